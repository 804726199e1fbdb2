"""Chunks cover the text, respect the limit, and are cut at its seams."""

import re
import time
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvrag.chunk
from kvrag.chunk import Document, normalise_text
from kvrag.errors import ParameterError
from kvrag.ingest import chunker
from kvrag.ingest.chunker import chunk_document
from kvrag.ingest.headings import find_headings
from tests.support.models import make_tokenizer
from tests.support.properties import examples


def cut(text: str, chunk_tokens: int = 32) -> list[str]:
    return [c.text for c in chunk_document(Document("d", text), make_tokenizer(), chunk_tokens)]


def squeeze(text: str) -> str:
    return re.sub(r"\s+", "", text)


words = st.text(
    st.sampled_from("abc éß.!?\n\r\t #-`。東京😀e\u0301\u00a0\u2028\f"), min_size=0, max_size=400
)


@settings(max_examples=examples(150))
@given(text=words, limit=st.integers(16, 64))
def test_chunks_cover_the_text_within_the_limit(text: str, limit: int) -> None:
    tokenizer = make_tokenizer()
    chunks = chunk_document(Document("d", text, {"k": 1}), tokenizer, limit)
    joined = squeeze("".join(chunk.text for chunk in chunks))
    assert joined == squeeze(normalise_text(text))
    for ordinal, chunk in enumerate(chunks):
        assert chunk.text == normalise_text(chunk.text) != ""
        alone = tokenizer(chunk.text, add_special_tokens=False, return_offsets_mapping=True)
        assert list(chunk.token_ids) == alone["input_ids"]
        assert list(chunk.token_starts) == [start for start, _ in alone["offset_mapping"]]
        assert 1 <= len(chunk.token_ids) <= limit
        assert (chunk.source, chunk.ordinal) == ("d", ordinal)
        assert chunk.metadata["k"] == 1
    assert len({chunk.chunk_id for chunk in chunks}) == len(chunks)


def test_long_texts_are_cut_alike_in_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    text = " ".join(f"Sentence number {i} of the book stands here." for i in range(300))
    whole = cut(text)
    monkeypatch.setattr(chunker, "_STRETCH_CHARACTERS", 700)
    monkeypatch.setattr(chunker, "_MAX_CHARACTERS_PER_TOKEN", 8)
    stretched = cut(text)
    assert squeeze("".join(stretched)) == squeeze(text)
    assert all(piece.endswith(".") for piece in whole)
    assert len(stretched) <= len(whole) * 1.1


def test_cuts_prefer_headings_then_paragraphs_then_sentences() -> None:
    filler = "the old bridge of the river "
    text = f"{filler * 2}\n\n{filler}end.\n\n# Next\n\n{filler * 2}"
    pieces = cut(text, 40)
    assert pieces[1].startswith("# Next")
    pieces = cut(f"{filler * 2}one. Two\n\n{filler * 3}", 40)
    assert pieces[0].endswith("Two")
    pieces = cut(f"{filler * 2}one. Two {filler * 3}", 40)
    assert pieces[0].endswith("one.")
    pieces = cut(filler * 9, 40)
    assert all(not piece.endswith(("th", "ol", "bri", "riv")) for piece in pieces)


def test_headings_and_pages_go_with_the_chunks() -> None:
    filler = "the old bridge crosses the river at Varn. " * 4
    text = f"# One\n\n{filler}\n```\n# no heading\n```\n\f{filler}\n\n## Two ##\n\n{filler}"
    chunks = chunk_document(Document("d", text), make_tokenizer(), 32)
    assert chunks[0].metadata == {"start": 0, "heading": "One", "headings": ["One"], "page": 1}
    whole = chunker._prepare(text).text
    starts = [whole.index(chunk.text, chunk.metadata["start"]) for chunk in chunks]
    assert starts == [chunk.metadata["start"] for chunk in chunks]
    assert chunks[-1].metadata == {
        **{"start": starts[-1], "heading": "Two", "headings": ["One", "Two"], "page": 2}
    }
    assert "\f" not in "".join(chunk.text for chunk in chunks)
    assert {chunk.metadata["heading"] for chunk in chunks} == {"One", "Two"}


def test_a_documents_own_metadata_wins() -> None:
    (chunk,) = chunk_document(
        Document("d", "# One\n\ntext", {"heading": "mine"}), make_tokenizer(), 32
    )
    assert chunk.metadata == {"heading": "mine", "headings": ["One"]}


def test_a_tiny_limit_is_refused() -> None:
    with pytest.raises(ParameterError, match="at least 16, found 8"):
        cut("x", 8)


def test_no_two_documents_have_a_chunk_of_the_same_id() -> None:
    given = [Document("q", "0\0b"), Document("q\x000", "b"), Document("q", "\0b")]
    ids = {chunk_document(document, make_tokenizer(), 32)[0].chunk_id for document in given}
    assert len(ids) == 3


@pytest.mark.parametrize(
    ("text", "titles"),
    [
        ("# One #\n\n## About C#\n\n### \n\n####### no\n\n#no", ["One", "About C#"]),
        ("   # In\n\n    # code", ["In"]),
        ("One\n===\n\ntext\n\nTwo\n---\ntext", ["One", "Two"]),
        ("a\n\n- item\n---\n\n| x |\n---\n\nx | y\n--- | ---\n\n---\n\n# One\n---", ["One"]),
        ("---\ntitle: x\n---\n\ntwo\nlines\n---", []),
        ("```\n# no\n~~~\n# no\n```\n# One", ["One"]),
        ("````\n```\n# no\n````\n~~~ py\n# no\n~~~ no end\n# no", []),
        ("# " + "t" * 1000, ["t" * 256]),
        ("```tick()```\n\n# Seen", ["Seen"]),
        ("``` a`b\n\n# Seen", ["Seen"]),
        ("~~~ a`b\n# no\n```\n~~~\n# Seen", ["Seen"]),
        ("<!--\n# no\n\nno\n---\n-->\n# Seen", ["Seen"]),
        ("<!-- a --> b\n# Seen", ["Seen"]),
        ("<!-- never closed\n\n# Seen", ["Seen"]),
        ("```\n<!--\n```\n# Seen\n\n-->", ["Seen"]),
        ("<pre>\n# no\n</pre>\n# Seen", ["Seen"]),
        ("<SCRIPT>\n# no\n</script>\n\n# Seen", ["Seen"]),
        ("---\ntitle: a\n# no\n\ntags: b\n---\n# Seen", ["Seen"]),
        ("---\n# Seen\n---", ["Seen"]),
    ],
)
def test_headings_are_those_of_markdown(text: str, titles: list[str]) -> None:
    found = find_headings(text)
    assert [one.title for one in found] == titles
    assert all(text[one.start :].lstrip(" #").startswith(one.title) for one in found)
    assert [one.start for one in found] == sorted(one.start for one in found)


_MANY = 50_000


@pytest.mark.parametrize(
    "text",
    [
        "# a" + " #" * (_MANY // 2) + "x",
        "# a" + " " * _MANY + "x",
        "a\n" + "=" * _MANY + "x",
        "a\n=" + " " * _MANY + "x",
        "a\n=\n" * (_MANY // 4),
        "- a\n" * (_MANY // 4),
        "```\n" * (_MANY // 4),
        '."' * (_MANY // 2),
        "." + '"' * _MANY + "x",
        "a" + "\n " * (_MANY // 2) + "b",
        "a" + "\u0300\u0316" * (_MANY // 4),
        "w" * _MANY,
    ],
    ids=lambda text: repr(text[:8]),
)
def test_no_text_takes_more_than_its_length_in_time(text: str) -> None:
    # CPU time: what took a quarter of a minute and more takes half a second.
    started = time.process_time()
    cut(text, 512)
    assert time.process_time() - started < 8


marks = st.text(
    st.sampled_from("a\u00e9\u0300\u0316\u0334\u0344\u0f73\u1100\u1161\u3099か。\u202e \n")
)


@settings(max_examples=examples(500), deadline=None)
@given(text=marks)
def test_long_runs_of_marks_are_normalised_as_python_does(text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kvrag.chunk, "_LONG_RUN", re.compile(r"[^\w\x00-\x7f]{2,}"))
        assert normalise_text(text) == unicodedata.normalize("NFC", text).strip()
