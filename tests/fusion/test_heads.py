"""Where chunk heads stand, against looking everywhere."""

from __future__ import annotations

import random
import tracemalloc

import pytest

from kvrag.fusion.heads import Heads


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
