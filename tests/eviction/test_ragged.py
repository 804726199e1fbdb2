"""Rows of heads that keep different numbers: nothing is lost or mixed up, and memory follows."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrag.eviction.base import HeldKeys
from kvrag.eviction.cache import STEP_ROWS, RaggedKV
from tests.support.properties import examples

HEAD_DIM = 2


def rows_of(places: torch.Tensor, head: int) -> torch.Tensor:
    """Return rows that tell their place and head."""
    return torch.stack([places.float(), torch.full_like(places, head, dtype=torch.float32)], dim=-1)


def make_ragged(held: torch.Tensor) -> RaggedKV:
    """Return heads ``[A, N]`` of one prompt each with keys where `held` says so."""
    num_heads, num_rows = held.shape
    places = torch.arange(num_rows).repeat(num_heads, 1)
    column = torch.full((num_heads, 1), num_rows)
    keys = torch.stack([rows_of(places[head], head) for head in range(num_heads)])[None]
    marks = places.float() / 7
    kept = HeldKeys(places, held, marks, column, column, torch.zeros_like(column))
    return RaggedKV(keys, -keys, kept)


def check(kv: RaggedKV, expected: list[set[int]]) -> None:
    for head, places in enumerate(expected):
        count = len(places)
        assert kv.counts[head] == count
        found = kv.notes.places[head, :count]
        assert set(found.tolist()) == places
        assert kv.notes.held[head].sum() == count
        assert kv.notes.held[head, :count].all()
        keys, values = kv.head(head)
        assert torch.equal(keys, rows_of(found, head))
        assert torch.equal(values, -keys)


@settings(max_examples=examples(25))
@given(st.data())
def test_rows_come_and_go(data: st.DataObject) -> None:
    draw = torch.Generator().manual_seed(data.draw(st.integers(0, 10_000)))
    num_heads, num_rows = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 300))
    held = torch.rand(num_heads, num_rows, generator=draw) < 0.8
    held[:, -1] = True
    kv = make_ragged(held)
    expected = [set(row.nonzero()[:, 0].tolist()) for row in held]
    check(kv, expected)
    place = num_rows
    for share in data.draw(st.lists(st.sampled_from([0.0, 0.02, 0.5, 0.97]), max_size=8)):
        for _ in range(data.draw(st.integers(1, 40))):
            rows = torch.stack([rows_of(torch.tensor(place), head) for head in range(num_heads)])
            kv.append(rows, -rows)
            for places in expected:
                places.add(place)
            place += 1
        slots = max(kv.counts)
        gone = kv.notes.held[:, :slots] & (torch.rand(num_heads, slots, generator=draw) < share)
        for head, places in enumerate(expected):
            places -= set(kv.notes.places[head, :slots][gone[head]].tolist())
        kv.remove(gone)
        check(kv, expected)
        spare = kv.keys.shape[0] - sum(kv.counts)
        assert spare <= 2 * STEP_ROWS * num_heads


def test_marks_follow_their_keys_and_memory_goes_in_steps() -> None:
    """A few rows that go leave the block as it is; more make it anew, smaller."""
    kv = make_ragged(torch.ones(2, 1000, dtype=torch.bool))
    gone = torch.zeros(2, 1000, dtype=torch.bool)
    gone[0, ::3] = True
    gone[1, :150] = True
    assert kv.remove(gone)
    notes = kv.notes
    assert torch.equal(notes.marks[notes.held], notes.places[notes.held].float() / 7)

    def below(place: int) -> torch.Tensor:
        slots = max(kv.counts)
        return kv.notes.held[:, :slots] & (kv.notes.places[:, :slots] < place)

    assert [kv.remove(below(place)) for place in (700, 703, 706)] == [True, False, False]
