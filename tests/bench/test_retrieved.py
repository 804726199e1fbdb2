"""Suite ``retrieved``: what is asked of a folder, and prompts of what a search finds."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvrag.chunk import Document
from kvrag.codec.registry import get_codec
from kvrag.errors import ParameterError
from kvrag.ingest.index import Index
from kvrag.models.kv_model import KVModel
from kvrag_bench.corpora import Case, asked_of, read_corpus, without_copies
from kvrag_bench.judge.bank import ChunkBank
from kvrag_bench.judge.judgements import Asked
from kvrag_bench.judge.judging import Judge
from kvrag_bench.quality import entrants, retrieved
from kvrag_bench.quality.contest import run_quality_bench
from kvrag_bench.quality.entrants import QualityOptions
from kvrag_bench.quality.retrieved import Found, retrieve
from tests.support.models import make_model, make_tokenizer

TOPICS = ("harbour ledger", "tall clock", "salt market", "glass bridge", "winter ferry")


def sentence(topic: str, number: int, name: str = "west") -> str:
    return f"The {topic} of {name} {number} is kept by a person in {name} whom nobody has yet seen."


@pytest.fixture
def pages(tmp_path: Path) -> Path:
    folder = tmp_path / "pages"
    folder.mkdir()
    for name in ("north", "south"):
        parts = (
            f"<h2>{number}. Of the {topic}, {name}</h2><p>{sentence(topic, number, name)}</p>"
            for number, topic in enumerate(TOPICS, 1)
        )
        (folder / f"{name}.html").write_text(f"<h1>{name}</h1>{''.join(parts)}", "utf-8")
    (folder / "notes.txt").write_text("The same again.")
    return folder


@pytest.fixture(scope="module")
def model() -> Iterator[KVModel]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    random = make_model(num_hidden_layers=2, max_position_embeddings=4096)
    yield KVModel(random, make_tokenizer(), name="random")
    torch.set_num_threads(before)


def found(data: Path, model: KVModel, **changed: Any) -> Found:
    """Return what is found; an index of the same texts is made once."""
    given = {"tops": (1, 3), "chunk_tokens": 48, "num_questions": 4, "beside": data.parent / "kept"}
    return retrieve(str(data), model, **{**given, **changed})


def test_headings_and_first_sentences_are_asked_for(pages: Path) -> None:
    documents, cases = read_corpus(str(pages))
    # Where there are HTML pages, other files are copies of them.
    assert [one.source for one in documents] == ["north.html", "south.html"]
    first = sentence("harbour ledger", 1, "north")
    begun, rest = first[: first.index(" a person")], first[first.index("a person") :]
    assert cases[:2] == [
        Case("Of the harbour ledger, north?", (first,), ("north.html",)),
        Case(f"{begun} ...", (rest,), ("north.html",)),
    ]
    assert len(cases) == 2 * 2 * len(TOPICS)


@pytest.mark.parametrize(
    ("text", "questions"),
    [
        # A heading that stands twice says nothing, and neither does a single word.
        (f"# Of it\n\n{sentence('a', 1)}\n\n# Of it\n\n{sentence('b', 2)}", 2),
        (f"# It\n\n{sentence('a', 1)}", 1),
        (f"# Chapter 3. Of it\n\n{sentence('a', 1)}", 2),
        # Lists, code and short sentences are passed over, up to the next heading.
        (f"# Of it\n\n- {sentence('a', 1)}\n\nToo short.\n\n{sentence('b', 1)}", 2),
        (f"# Of it\n\nToo short.\n\n# Of that\n\n{sentence('b', 1)}", 2),
        ("Nothing to ask for.", 0),
    ],
)
def test_what_is_asked_for(text: str, questions: int) -> None:
    cases = list(asked_of([Document("page", text)]))
    assert len(cases) == questions
    assert not any(one.question.startswith(("Chapter", "It?", "Too")) for one in cases)


def test_windows_over_one_text_are_copies() -> None:
    words = [f"word{number}" for number in range(300)]
    windows = [
        Document(str(start), " ".join(words[start : start + 100])) for start in range(0, 201, 50)
    ]
    assert [one.source for one in without_copies(windows)] == ["0", "100", "200"]
    few = [Document("a", "a few words"), Document("b", "a few words"), Document("c", "others")]
    assert [one.source for one in without_copies(few)] == ["a", "c"]


def test_prompts_hold_what_a_search_finds(pages: Path, model: KVModel) -> None:
    asked = found(pages, model).questions
    assert [one.type for one in asked] == ["top 1", "top 3"] * 4
    for alone, together in zip(asked[::2], asked[1::2], strict=True):
        assert alone.question == together.question
        # The best chunk is in both; the best document stands last.
        assert len(alone.texts) == 1
        assert len(together.texts) == 3
        assert alone.texts[0] in together.texts
        assert not any(map(any, (*alone.before, *together.before)))
    # Where a context holds them, earlier chunks are given.
    held = found(pages, model, contexts=("none", "document")).questions
    assert any(any(one.before) for one in held)
    assert not any(part.text in part.before for one in held for part in one.passages)
    # More questions begin with the same ones; another seed draws others.
    assert found(pages, model, num_questions=6).questions[: len(asked)] == asked
    assert {one.question for one in found(pages, model, seed=1).questions} != {
        one.question for one in asked
    }


def test_texts_of_contexts_are_of_the_corpus(pages: Path, model: KVModel) -> None:
    nothing = found(pages, model)
    assert nothing.similar == {}
    # The others are copies of each other, but for a name.
    other = "Flour, water and salt are all that a baker of bread needs besides an oven and a night."
    (pages / "east.html").write_text(f"<h2>1. Of bread</h2><p>{other}</p>", "utf-8")
    texts = found(pages, model, contexts=("similar:40",), chunk_tokens=256)
    assert set(texts.similar) == {text for one in texts.questions for text in one.texts}
    for chunk, ids in texts.similar.items():
        before = model.tokenizer.decode(ids)
        assert len(ids) <= 40
        assert before
        assert chunk not in before
        assert ("bread" in chunk) != ("bread" in before)


def test_an_index_is_kept_for_the_next_run(
    pages: Path, model: KVModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "judged.jsonl"
    first = found(pages, model, beside=out)
    monkeypatch.setattr(Index, "create", lambda *_, **__: pytest.fail("was made already"))
    more = found(pages, model, beside=out, num_questions=6)
    assert more.questions[: len(first.questions)] == first.questions
    # Another text is another corpus.
    (pages / "north.html").write_text("<h1>north</h1>", "utf-8")
    with pytest.raises(BaseException, match="was made already"):
        found(pages, model, beside=out)


def test_chunks_are_encoded_after_their_own_text(model: KVModel) -> None:
    similar = {"one of them": (5, 6, 7), "another": (8, 9), "none": ()}
    bank = ChunkBank(model, [*similar], [get_codec("raw")], context="similar", similar=similar)
    # Alone where it stands first in a prompt, as after a filler.
    found = [chunk.contexts for chunk in bank._chunks.values()]
    assert found == [((5, 6, 7), ()), ((8, 9), ()), ((),)]


def test_rows_of_the_suite(
    pages: Path, model: KVModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[list[str]] = []
    open_banks = Judge._open_banks

    def note(self: Judge, asked: Sequence[Asked]) -> None:
        encoded.append([one.question.place for one in asked])
        open_banks(self, asked)

    monkeypatch.setattr(Judge, "_open_banks", note)
    options = QualityOptions(
        model=model,
        data=str(pages),
        suite=("retrieved",),
        policies=("none", "two_stage"),
        ratios=(0.3,),
        contexts=("none", "filler:16", "similar:40"),
        num_questions=2,
        max_tokens=4,
        tops=(2, 3),
        chunk_tokens=48,
        out=tmp_path / "judged.jsonl",
    )
    rows = run_quality_bench(options)
    by_name = {(one.policy, one.context): one for one in rows if one.question_type == "overall"}
    assert len(by_name) == 2 * 3 + 2
    assert {one.question_type for one in rows} == {"overall", "top 2", "top 3"}
    assert {one.dataset for one in rows} == {"retrieved from pages"}
    plain = by_name["none", "none"]
    assert plain.num_questions == 4
    assert by_name["boundary", "none"].kl < 1e-6 < plain.kl
    assert len({by_name["none", one].kl for one in ("none", "filler:16", "similar:40")}) == 3
    assert len((tmp_path / "judged.jsonl").read_bytes().splitlines()) == 4 * 7 + 2
    # What one question's prompts need is encoded, and its judgements written, before the next.
    assert encoded == [
        [f"pages, question {number}, top {top}" for top in (2, 3)] for number in (0, 1)
    ]
    # Where other passages are chosen, what was judged after them is judged again.
    retrieve.cache_clear()
    chosen = retrieved.retrieve

    def other(*given: Any, **named: Any) -> Found:
        found = chosen(*given, **named)
        return replace(found, similar=dict.fromkeys(found.similar, (5, 6, 7)))

    monkeypatch.setattr(entrants, "retrieve", other)
    again = run_quality_bench(options)
    assert len((tmp_path / "judged.jsonl").read_bytes().splitlines()) == 4 * 9 + 2
    kl = {(one.policy, one.context): one.kl for one in again if one.question_type == "overall"}
    assert {key for key in kl if kl[key] != by_name[key].kl} == {
        ("none", "similar:40"),
        ("two_stage", "similar:40"),
    }


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"suite": ("retrieved", "bridge")}, "judged alone"),
        ({"tops": ()}, "top empty: expected numbers from 1"),
        ({"tops": (0,)}, "top 0"),
        ({"num_questions": 0}, "0 questions"),
        ({"data": "nowhere"}, "no data set at 'nowhere'"),
        ({"suite": ("bridge",), "contexts": ("similar",)}, "only the suite 'retrieved'"),
        ({"contexts": ("similar:x",)}, "context 'similar:x'"),
        ({"contexts": ("corpus",)}, "context 'corpus': expected one"),
        ({"contexts": ("similar:5000",), "num_questions": 1}, "context similar:5000 and chunk_tok"),
    ],
)
def test_what_cannot_be_asked(
    pages: Path, model: KVModel, changed: dict[str, Any], message: str
) -> None:
    options = {"model": model, "data": str(pages), "suite": ("retrieved",), **changed}
    with pytest.raises(ParameterError, match=message):
        run_quality_bench(QualityOptions(**options))


def test_a_folder_without_headings(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="no document in this folder"):
        read_corpus(str(tmp_path))
    (tmp_path / "page.txt").write_text("No heading.")
    with pytest.raises(ParameterError, match=r"nothing to ask, as none of its documents \(1\)"):
        read_corpus(str(tmp_path))
