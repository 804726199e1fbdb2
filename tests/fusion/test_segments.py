from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrag.chunk import normalise_text
from kvrag.fusion import segments
from kvrag.fusion.segments import MIN_PREFIX_LENGTH, ChunkMatcher, Match
from tests.fusion.prompts import corpora, prompts
from tests.support.properties import examples

A = "Ines keeps the harbour ledger of Varn, and nobody else may write in it before noon.\nSo be it."
B = "Tomas repairs the tall clock whenever the northern light fails, which is twice a winter."
SHORT = "See appendix C."


def make_matcher(texts: dict[str, str], **options) -> ChunkMatcher:
    matcher = ChunkMatcher(**options)
    for chunk_id, text in texts.items():
        matcher.add(chunk_id, text)
    return matcher


def check(prompt: str, matches: list[Match], corpus: dict[str, str]) -> None:
    """Assert what must be true of any result."""
    end = 0
    for match in matches:
        assert end <= match.start < match.end <= len(prompt)
        text, found = normalise_text(corpus[match.chunk_id]), prompt[match.start : match.end]
        assert match.is_prefix == (found != text)
        assert text.startswith(found)
        assert not match.is_prefix or len(found) >= MIN_PREFIX_LENGTH
        end = match.end


# --- examples ---------------------------------------------------------------------------------


def test_text_is_normalised_when_added_but_the_prompt_is_not():
    matcher = make_matcher({"a": "  Caf\u0065\u0301 by the harbour of Varn,\r\nopen at noon. \n"})
    assert len(matcher.find("> Caf\u00e9 by the harbour of Varn,\nopen at noon.")) == 1
    assert matcher.find("> Caf\u0065\u0301 by the harbour of Varn,\r\nopen at noon.") == []


def test_crlf_prompt_matches_up_to_the_line_end_and_offsets_behind_it_hold():
    prompt = f"{A}\n\n{B}".replace("\n", "\r\n")
    matches = make_matcher({"a": A, "b": B}).find(prompt)
    line_end = A.index("\n")
    start = prompt.index(B)
    assert matches == [Match("a", 0, line_end, True), Match("b", start, start + len(B), False)]


def test_contained_chunk_does_not_break_the_longer_one():
    texts = {"inner": A[5:60], "head": A[:40], "short": A[10:20], "a": A}
    assert make_matcher(texts).find(A) == [Match("a", 0, len(A), False)]
    # Nor when the longer one is cut.
    assert make_matcher(texts).find(A[:-5]) == [Match("head", 0, 40, False)]
    assert make_matcher({**texts, "head": ""}).find(A[:-5]) == [Match("a", 0, len(A) - 5, True)]


def test_cut_chunk_that_goes_on_far_beyond_a_whole_one_wins():
    longer = f"{A} {B}"
    matcher = make_matcher({"a": A, "longer": longer})
    assert matcher.find(longer[:-1]) == [Match("longer", 0, len(longer) - 1, True)]
    assert matcher.find(longer[: len(A) + 20]) == [Match("a", 0, len(A), False)]


def test_cut_chunk_gives_way_to_the_chunk_behind_it():
    # The cut chunk happens to go on with the characters that stand behind the cut.
    cut = A[:70] + "\n\nTomorrow"
    prompt = A[:70] + "\n\n" + B
    assert make_matcher({"a": cut, "b": B}).find(prompt) == [
        Match("a", 0, 72, True),
        Match("b", 72, len(prompt), False),
    ]
    # The same where that one is cut as well.
    assert make_matcher({"a": cut, "b": B + "..."}).find(prompt) == [
        Match("a", 0, 72, True),
        Match("b", 72, len(prompt), True),
    ]


def test_very_many_chunks_are_found_and_marked_as_they_come():
    """Not by the first prompt, all of them at once."""
    texts = {str(number): f"{number:08d} of the chunks in this place" for number in range(100_000)}
    matcher = make_matcher(texts)
    tracemalloc.start()
    try:
        assert matcher.find(" " * 400) == []
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    wanted = ["99999", "0", "4096", "70001"]
    found = matcher.find(" ".join(texts[one] for one in wanted * 4))
    assert [match.chunk_id for match in found] == wanted * 4


def test_equal_texts_report_the_hinted_chunk():
    matcher = make_matcher({"first": A, "second": A})
    assert matcher.find(A)[0].chunk_id == "first"
    assert matcher.find(A, ["unknown", "second"])[0].chunk_id == "second"
    matcher.discard("first")
    assert matcher.find(A)[0].chunk_id == "second"


def test_hint_finds_a_cut_chunk_among_very_many_that_begin_alike():
    header = "file_path: /srv/documents/handbook-of-the-harbour.md\n\n"
    texts = {str(number): f"{header}Part {number}. {A}" for number in range(100)}
    matcher = make_matcher(texts)
    prompt = texts["77"][:-10]
    assert matcher.find(prompt, ["77"]) == [Match("77", 0, len(prompt), True)]
    assert matcher.find(texts["77"]) == [Match("77", 0, len(prompt) + 10, False)]


def test_add_replaces_and_discard_forgets():
    matcher = make_matcher({"a": A})
    matcher.add("a", B)
    assert [m.chunk_id for m in matcher.find(f"{A}\n\n{B}")] == ["a"]
    assert "a" in matcher
    assert len(matcher) == 1
    matcher.discard("a")
    matcher.discard("never known")
    assert matcher.find(B) == []
    assert len(matcher) == 0


def test_texts_are_fetched_only_for_what_is_found():
    texts = {"a": A, "b": B}
    asked = []

    def fetch(chunk_id: str) -> str:
        asked.append(chunk_id)
        return texts[chunk_id]

    matcher = make_matcher(texts, fetch_text=fetch)
    for _ in range(2):
        assert [m.chunk_id for m in matcher.find(f"- {B}\n- {B}")] == ["b", "b"]
    assert asked == ["b"]
    after = matcher.copy()
    after.discard("b")
    after.add("b", A)
    texts["b"] = A
    assert [m.chunk_id for m in after.find(f"- {A}\n- {B}", ["b"])] == ["b"]
    assert asked[1:] == ["b"]


@pytest.mark.parametrize("now", [None, B])
def test_chunk_whose_text_is_gone_or_changed_is_not_found(now):
    matcher = ChunkMatcher(lambda chunk_id: now)
    matcher.add("a", A)
    assert matcher.find(A) == []


def test_work_on_a_hostile_prompt_is_bounded(monkeypatch):
    texts = {str(length): "-" * length + "x" for length in range(100, 400)}
    prompt = "-" * 5000
    check(prompt, make_matcher(texts).find(prompt), texts)
    monkeypatch.setattr(segments, "_MAX_COMPARISONS", 0)
    assert make_matcher({"a": A, "b": B}).find(f"{A} {B[:-1]}") == [Match("a", 0, len(A), False)]
    monkeypatch.setattr(segments, "_MAX_HASHES", 0)
    assert make_matcher({"a": A, "b": B}).find(f"{A} {B}") == []


# --- properties -------------------------------------------------------------------------------


@settings(max_examples=examples(150), derandomize=True)
@given(st.data())
def test_every_separated_chunk_is_found(data):
    corpus = data.draw(corpora())
    prompt, inserted = data.draw(prompts(corpus))
    matches = make_matcher(corpus).find(prompt)
    check(prompt, matches, corpus)
    places = {(m.start, m.end) for m in matches if not m.is_prefix}
    for item in inserted:
        end = item.start + len(item.text)
        if not item.is_cut:
            assert (item.start, end) in places
        elif len(item.text) >= MIN_PREFIX_LENGTH:
            # A cut chunk is covered from its start, by itself or by one that is whole.
            assert any(m.start == item.start for m in matches)


@settings(max_examples=examples(150), derandomize=True)
@given(st.data())
def test_hints_and_fetching_change_no_place(data):
    corpus = data.draw(corpora())
    prompt, _ = data.draw(prompts(corpus))
    hints = data.draw(st.lists(st.sampled_from(sorted(corpus))))

    def places(matches: list[Match]) -> list[tuple[int, int, bool]]:
        return [(m.start, m.end, m.is_prefix) for m in matches]

    plain = make_matcher(corpus).find(prompt)
    hinted = make_matcher(corpus, fetch_text=corpus.get).find(prompt, hints)
    check(prompt, hinted, corpus)
    assert places(hinted) == places(plain)


@settings(max_examples=examples(150), derandomize=True)
@given(st.data())
def test_discarding_leaves_no_trace(data):
    corpus = data.draw(corpora())
    prompt, _ = data.draw(prompts(corpus))
    matcher = make_matcher(corpus)
    for chunk_id in data.draw(st.sets(st.sampled_from(sorted(corpus)))):
        matcher.discard(chunk_id)
        del corpus[chunk_id]
    assert matcher.find(prompt) == make_matcher(corpus).find(prompt)


def search_naively(prompt: str, corpus: dict[str, str]) -> list[tuple[int, int]]:
    places, position = [], 0
    while position < len(prompt):
        ends = [position + len(t) for t in corpus.values() if prompt.startswith(t, position)]
        if ends:
            places.append((position, max(ends)))
            position = max(ends)
        else:
            position += 1
    return places


@settings(max_examples=examples(150), derandomize=True)
@given(
    st.lists(st.text("ab", min_size=32, max_size=48), min_size=1, max_size=5),
    st.lists(st.one_of(st.integers(0, 4), st.text("ab", max_size=4)), max_size=8),
)
def test_whole_chunks_are_those_of_a_naive_search(texts, pieces):
    corpus = {str(number): text for number, text in enumerate(texts)}
    prompt = "".join(p if isinstance(p, str) else texts[p % len(texts)] for p in pieces)
    matches = make_matcher(corpus, min_prefix_length=1000).find(prompt)
    assert [(m.start, m.end) for m in matches] == search_naively(prompt, corpus)


def test_find_all_tells_chunks_that_others_cover() -> None:
    matcher = ChunkMatcher()
    text = "Ines keeps the harbour ledger of Varn, and nobody else may write in it before noon."
    cover = "Context: " + text[:60]
    for chunk_id, one in {"whole": text, "cover": cover, "short": "ledger of"}.items():
        matcher.add(chunk_id, one)
    prompt = f"Context: {text} End."
    assert [match.chunk_id for match in matcher.find(prompt)] == ["cover"]
    spans, is_whole = matcher.find_all(prompt)
    assert is_whole
    assert [prompt[start:end] for start, end in spans] == [cover, text, "ledger of"]


def test_find_all_says_when_it_gave_up(monkeypatch: pytest.MonkeyPatch) -> None:
    matcher = ChunkMatcher()
    matcher.add("a", "the quick brown fox jumps over the lazy dog " * 3)
    monkeypatch.setattr("kvrag.fusion.segments._MAX_HASHES", 0)
    assert matcher.find_all("the quick brown fox jumps over the lazy dog " * 3)[1] is False
