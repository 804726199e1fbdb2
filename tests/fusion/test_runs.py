"""Runs inside chunks: found wherever the text was cut, and never with other tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrag.chunk import Chunk
from kvrag.fusion import runs as r
from kvrag.fusion.layout import MISS_OWNER_UNCLEAR, Layout, ReusedSpan
from tests.support.properties import examples


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def text_of(token_ids: list[int]) -> str:
    return "".join(chr(ord("a") + one % 26) for one in token_ids)


def found(prompt: np.ndarray, chunks: dict[str, np.ndarray], gaps=None) -> list[r.Run]:
    gaps = [(0, len(prompt))] if gaps is None else gaps
    _, usable = r.find_runs(prompt, gaps, chunks, text_of)
    return [one.run for one in r.choose_runs(usable)]


def longest_first(prompt: list[int], chunks: dict[str, list[int]]) -> list[int]:
    """Return the lengths of the runs that a naive search takes, in the order in which it does."""
    free = [True] * len(prompt)
    taken = []
    while True:
        best, place = 0, 0
        for start in range(len(prompt)):
            for chunk in chunks.values():
                for offset in range(len(chunk)):
                    length = 0
                    while (
                        start + length < len(prompt)
                        and offset + length < len(chunk)
                        and free[start + length]
                        and prompt[start + length] == chunk[offset + length]
                    ):
                        length += 1
                    if length > best:
                        best, place = length, start
        if best < r.MIN_RUN:
            return taken
        taken.append(best)
        free[place : place + best] = [False] * best


@st.composite
def cut_texts(draw):
    """Return a prompt of pieces of chunks and of other tokens, and the chunks."""
    seed = draw(st.integers(0, 2**32 - 1))
    random = np.random.default_rng(seed)
    alphabet = draw(st.sampled_from((4, 50, 40_000)))
    chunks = {
        str(number): random.integers(0, alphabet, draw(st.integers(1, 120))).tolist()
        for number in range(draw(st.integers(1, 4)))
    }
    if draw(st.booleans()):
        chunks["copy"] = list(chunks["0"][draw(st.integers(0, 30)) :]) or [1]
    prompt: list[int] = []
    for _ in range(draw(st.integers(1, 4))):
        prompt += random.integers(0, alphabet, draw(st.integers(0, 12))).tolist()
        chunk = chunks[draw(st.sampled_from(sorted(chunks)))]
        begin = draw(st.integers(0, len(chunk)))
        prompt += chunk[begin : begin + draw(st.integers(0, 100))]
    return prompt, chunks


@given(cut_texts())
@settings(max_examples=examples(100))
def test_runs_against_a_naive_search(case):
    prompt, chunks = case
    arrays = {name: ids(*chunk) for name, chunk in chunks.items()}
    runs = found(ids(*prompt), arrays)
    end = 0
    for run in runs:
        assert run.start >= end
        end = run.end
        assert prompt[run.start : run.end] == chunks[run.chunk_id][run.offset :][: run.length]
    covered = sum(run.length for run in runs)
    wanted = longest_first(prompt, chunks)
    # Runs beside a long one may be shorter: at least what the naive search takes is reused.
    assert covered >= sum(wanted)
    assert [run.length for run in sorted(runs, key=lambda one: -one.length)][:1] == wanted[:1]


@given(cut_texts())
@settings(max_examples=examples(200))
def test_fingerprints_name_every_chunk_that_shares_a_long_run(case):
    prompt, chunks = case
    names = sorted(chunks)
    table = r.Fingerprints()
    for row, name in enumerate(names):
        table = table.with_chunks([(row, ids(*chunks[name]))])
    hashes = np.unique(r.window_minima(r.ngram_hashes(ids(*prompt))))
    _, rows = table.look_up(hashes, 100)
    for row, name in enumerate(names):
        if longest_first(prompt, {name: chunks[name]}):
            assert row in rows


def test_a_hash_of_very_many_chunks_names_only_some():
    chunk = np.arange(100, dtype=np.int32)
    table = r.Fingerprints().with_chunks((row, chunk) for row in range(50))
    hashes = np.unique(r.window_minima(r.ngram_hashes(chunk)))
    places, rows = table.look_up(hashes, 7)
    assert np.bincount(places).tolist() == [7] * len(hashes)
    assert set(rows.tolist()) == set(range(7))


@pytest.mark.parametrize(("length", "is_found"), [(r.MIN_RUN - 1, False), (r.MIN_RUN, True)])
def test_least_length(length, is_found):
    chunk = np.arange(100, 200, dtype=np.int32)
    prompt = np.concatenate([ids(1, 2), chunk[20 : 20 + length], ids(3, 4)])
    assert bool(found(prompt, {"a": chunk})) is is_found


def test_short_runs_count_together_only_with_the_same_words_between():
    chunk = np.arange(60, dtype=np.int32)
    lines = [chunk[number : number + 9] for number in range(0, 60, 10)]
    between = ids(*range(9, 60, 10))  # what the chunk has between the lines

    def prompt(joints: np.ndarray) -> np.ndarray:
        pieces = [piece for pair in zip(lines, joints[:, None], strict=True) for piece in pair]
        return np.concatenate(pieces)

    assert len(found(prompt(between + 260), {"a": chunk})) == 6  # `text_of` gives the same letters
    assert found(prompt(between + 261), {"a": chunk}) == []


@pytest.mark.parametrize(
    ("text", "other", "are_same"),
    [
        ("\n\n", " ", True),
        (r"\n- \"Yes\"", '\n"Yes"', True),
        (r"caf\u00e9\t", "café ", True),
        ("&quot;a &amp; b&#x27;", "\"a & b'", True),
        ("cafe\u0301 ﬁn", "café fin", True),
        ("17 coins", "18 coins", False),
        ("\\new", "new", False),
        ("", "not", False),
    ],
)
def test_same_words(text, other, are_same):
    assert r.same_words(text, other) is are_same


def chunk_of(name: str, token_ids: tuple[int, ...], contexts=((),), source: str = "") -> Chunk:
    starts = tuple(range(len(token_ids)))
    return Chunk(name, name * 9, token_ids, starts, source or name, 0, contexts=contexts)


SHARED = tuple(range(500, 560))


def test_a_run_of_several_chunks_is_taken_only_if_the_prompt_tells_which():
    chunks = {
        name: chunk_of(name, (*seen, *SHARED)) for name, seen in (("a", (1, 2, 3)), ("b", (4,)))
    }
    layout = Layout((9, *SHARED, 9), (), 0, True)
    run, other = r.Run("a", 1, 61, 3, 60), r.Run("b", 1, 61, 1, 60)
    chosen = [r.ChosenRun(run, (other,))]
    unclear = r.fill(layout, chosen, chunks)
    assert unclear.spans == ()
    assert unclear.misses == {MISS_OWNER_UNCLEAR: 1}
    assert r.fill(layout, chosen, chunks, ["b"]).spans == (ReusedSpan("b", 1, 1, 60),)
    # Other text of the document is in the prompt.
    more = {**chunks, "first": chunk_of("first", tuple(range(80, 90)), source="a")}
    there = Layout((*range(80, 90), 9, *SHARED, 9), (ReusedSpan("first", 0, 0, 10),), 0, True)
    moved = [r.ChosenRun(r.Run("a", 11, 71, 3, 60), (r.Run("b", 11, 71, 1, 60),))]
    assert r.fill(there, moved, more).spans[1] == ReusedSpan("a", 11, 3, 60)


def test_equal_chunks_are_interchangeable_and_a_context_is_kept():
    contexts = ((7, 7), ())
    chunks = {name: chunk_of(name, (1, 2, *SHARED), contexts) for name in "ab"}
    layout = Layout((9, *SHARED, 9), (), 0, True)
    chosen = [r.ChosenRun(r.Run("a", 1, 61, 2, 60), (r.Run("b", 1, 61, 2, 60),))]
    (span,) = r.fill(layout, chosen, chunks).spans
    assert span == ReusedSpan("a", 1, 2, 60, (7, 7))


def test_a_run_whose_chunk_has_other_tokens_by_now_is_left_out():
    layout = Layout((9, *SHARED, 9), (), 0, True)
    chosen = [r.ChosenRun(r.Run("a", 1, 61, 0, 60))]
    assert r.fill(layout, chosen, {}).spans == ()
    changed = chunk_of("a", (*SHARED[:-1], 1))
    assert r.fill(layout, chosen, {"a": changed}).spans == ()
