"""Where chunk heads stand, against looking everywhere."""

from __future__ import annotations

import random
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrag.fusion.segments import Heads
from tests.support.properties import examples


def _everywhere(heads: set[str], width: int, text: str, start: int, end: int) -> list[int]:
    return [i for i in range(start, end - width + 1) if text[i : i + width] in heads]


@given(st.data())
@settings(max_examples=examples(60))
def test_positions_are_those_found_by_looking_everywhere(data: st.DataObject) -> None:
    width = data.draw(st.sampled_from([6, 8, 32]))
    # Few letters, so that heads overlap and repeat; one beyond 16 bits, half a surrogate pair.
    letters = st.sampled_from("ab\U0001f600\ud800")
    text = data.draw(st.text(letters, min_size=1, max_size=700))
    heads = Heads(width)
    assert not heads
    known: set[str] = set()
    for begin in data.draw(st.lists(st.integers(0, len(text)), max_size=12)):
        head = text[begin : begin + width]
        if len(head) == width:
            heads.add(head, str(begin), 100)
            known.add(head)
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, len(text)))
    assert heads.positions(text, start, end) == _everywhere(known, width, text, start, end)
    for head in sorted(known)[::2]:
        for chunk_id in list(heads[head]):
            heads.discard(head, chunk_id)
        known.discard(head)
    assert heads.positions(text, start, end) == _everywhere(known, width, text, start, end)
    assert bool(heads) == bool(known)


@pytest.mark.parametrize("num_heads", [8192, 8193, 40_000])
def test_many_heads_are_found_among_many(num_heads: int) -> None:
    draw = random.Random(0)
    heads = Heads(32)
    known = [f"{number:08d} of the chunks in this place"[:32] for number in range(num_heads)]
    for number, head in enumerate(known):
        heads.add(head, str(number), 50)
        if number == 5000:
            # Marked once before the table has to grow.
            assert heads.positions(" " * 300 + head, 0, 332) == [300]
    text = " ".join(draw.sample(known, 50))
    assert heads.positions(text, 0, len(text)) == list(range(0, 50 * 33, 33))
    assert heads[known[-1]] == {str(num_heads - 1): 50}


def test_very_many_heads_are_marked_as_they_come() -> None:
    """Not by the first prompt, all of them at once."""
    heads = Heads(32)
    for number in range(100_000):
        heads.add(f"{number:08d} of the chunks in this place"[:32], str(number), 50)
    tracemalloc.start()
    try:
        assert heads.positions(" " * 400, 0, 400) == []
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
