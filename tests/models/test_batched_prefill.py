"""Several prompts in one pass through layers, as on a card: each gets what it gets alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrag.fusion.fuser import FusedPrompt, fuse_in_slices
from kvrag.fusion.repair import make_repair
from kvrag.fusion.slices import Slices
from kvrag.kvcache import FusedKV
from kvrag.models import batched_prefill, cardlayers
from kvrag.models.batched_prefill import Meeting, Share, share_of
from kvrag.models.cardlayers import CardLayers, RowsAsked, Slots
from kvrag.models.compiled import describe_layers
from kvrag.models.kv_model import KVModel
from kvrag.models.rows import RowPass
from kvrag_testing.bench_top import Bench
from tests.models.test_card_layers import by_tensors, on_card
from tests.models.test_compiled import FAMILIES, model_of
from tests.models.test_row_graphs import CPU, Prompt, deep
from tests.support.properties import examples


def layers_over(model: KVModel) -> CardLayers:
    """Return layers whose slots all prompts share, in which nothing is a number yet."""
    described = describe_layers(model.rows.layers, model.windows, model._any_tables())
    slots = Slots(described, CPU)
    for slot in slots.of(256).values():
        slot.fill_(torch.nan)
    return CardLayers(described, slots)


def of_prompt(compiled: CardLayers) -> CardLayers:
    """Return what `KVModel.compile` does for a further prompt."""
    return CardLayers(compiled.description, compiled._slots)


def offer(
    prompt: Prompt, compiled: CardLayers, layers: range, *, looks: bool, **more: bool
) -> Share:
    asked = prompt.asked() if looks else None
    of = RowPass(prompt.rows, prompt.fused, prompt.tables, compiled)
    with Meeting().open():
        return share_of(prompt.model, layers, prompt.hidden, of, asked, **more)


def assert_joined_is_alone(model: KVModel, sizes: Sequence[tuple[int, int, bool]]) -> None:
    """Compare prompts of some tokens and rows, of which some look, with each alone."""
    compiled, meeting = layers_over(model), Meeting()
    ours, theirs = (
        [Prompt(model, tokens, rows, seed) for seed, (tokens, rows, _) in enumerate(sizes)]
        for _ in range(2)
    )
    layers = [of_prompt(compiled) for _ in ours]
    for first in range(0, model.spec.num_layers - 1, 2):
        group = range(first, min(first + 2, model.spec.num_layers - 1))
        shares = [
            offer(one, own, group, looks=looks)
            for one, own, (_, _, looks) in zip(ours, layers, sizes, strict=True)
        ]
        assert meeting.compute(shares) == shares
        assert all(one.is_done for one in shares)
    for one, other, (_, _, looks) in zip(ours, theirs, sizes, strict=True):
        other.run(of_prompt(compiled), looks=looks, together=False)  # type: ignore[arg-type]
        one.assert_like(other, looks=looks)


_sizes = st.integers(2, 60).flatmap(
    lambda tokens: st.tuples(st.just(tokens), st.integers(1, tokens), st.booleans())
)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=examples(30), deadline=None)
@given(sizes=st.lists(_sizes, min_size=2, max_size=4))
def test_rows_of_several_prompts_are_those_of_each_alone(family: str, sizes: Any) -> None:
    with patch.object(cardlayers, "operations_for", by_tensors):
        assert_joined_is_alone(deep(family), sizes)


# -- prompts that are fused ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(model_of("qwen2"))


def started(bench: Bench, policy: str, *order: int) -> Slices[FusedPrompt]:
    layout = bench.lay_out(bench.prompt(*order, question=f"Question {policy}:"))
    num_tokens = len(layout.token_ids)
    buffer = FusedKV(bench.model.spec, num_tokens, num_tokens + 3)
    return fuse_in_slices(bench.model, layout, bench.open_kv, make_repair(policy), buffer)


def offered(prompt: Slices[FusedPrompt], meeting: Meeting) -> Share:
    """Drive a prompt until it offers something."""
    with meeting.open():
        while (share := meeting.taken()) is None:
            next(prompt)
    return share


def test_an_error_ends_the_prompts_that_met(bench: Bench) -> None:
    compiled, meeting = layers_over(bench.model), Meeting()
    with (
        patch.object(KVModel, "compile", lambda _: of_prompt(compiled)),
        patch.object(cardlayers, "operations_for", by_tensors),
        patch.object(Meeting, "_run", side_effect=RuntimeError("the card is gone")),
    ):
        prompts = [started(bench, "none") for _ in range(2)]
        shares = [offered(one, meeting) for one in prompts]
        assert meeting.compute(shares) == shares
        for one in prompts:
            with pytest.raises(RuntimeError, match="the card is gone"):
                next(one)


# -- who meets -----------------------------------------------------------------------------------


class _Compiled(CardLayers):
    """Layers that differ from others only if their number does."""

    def __init__(self, number: int) -> None:
        self.number, self._slots = number, None

    def is_like(self, other: CardLayers) -> bool:
        return self.number == other.number


class _Graphs:
    def bucket_of(self, num_rows: int) -> int:
        return 32 if num_rows <= 32 else 64

    def room_for(self, num_rows: int) -> int:
        return 4 if num_rows <= 32 else 2


GRAPHS: Any = _Graphs()


def _share(
    first: int = 3,
    num_rows: int = 9,
    number: int = 0,
    *,
    captured: bool = False,
    looks: bool = False,
) -> Share:
    rows, model = torch.arange(num_rows), model_of("qwen2")
    compiled = _Compiled(number)
    of = RowPass(rows, FusedKV(model.spec, 1, 1), [], compiled)
    hidden, layers = torch.zeros(num_rows, 2), range(first, first + 1)
    asked = RowsAsked(hidden, 0, 0) if looks else None
    graphs = GRAPHS if captured else None
    return Share(model, layers, hidden, of, compiled, num_rows - 1, asked, graphs)


ON = {"captured": True}


@pytest.mark.parametrize(
    ("shares", "going"),
    [
        ([{}, {}, {}], {0, 1, 2}),
        ([{}, {"first": 4}, {}], {0, 2}),
        ([{"first": 9}, {}, {"first": 9}, {}], {1, 3}),  # those behind come closer
        ([{"first": 9}, {"first": 0}, {"first": 9}], {0, 2}),  # too far behind
        ([{"first": 9}, {"first": 0}, {"first": 20}], {0}),
        ([{"num_rows": 300}, {"num_rows": 300}, {"num_rows": 212}], {0, 2}),
        ([{"num_rows": 512}, {}], {0}),
        ([{}, {"number": 1}, {"looks": True}], {0, 2}),
        ([ON, {}, ON, ON | {"looks": True}, ON | {"num_rows": 40}], {0, 2}),
        ([ON, ON, ON, ON, ON, ON], {0, 1, 2, 3}),
        ([ON | {"num_rows": 40}, ON, ON | {"num_rows": 50}], {0, 2}),
    ],
)
def test_who_meets(shares: list[Any], going: set[int]) -> None:
    met: list[list[Share]] = []
    offered = [_share(**one) for one in shares]
    with (
        patch.object(Meeting, "_run", lambda _, some: met.append(some) is None),
        patch.object(batched_prefill, "_replay", lambda some: met.append(some) is None),
    ):
        found = Meeting().compute(offered)
    assert {number for number, one in enumerate(offered) if one in found} == going
    assert met == ([found] if len(found) > 1 else [])
    assert all(one.is_done for one in found) is (len(found) > 1)


def test_where_memory_is_short_fewer_meet() -> None:
    meeting = Meeting()
    shares = [_share(num_rows=200), _share(num_rows=200)]
    with patch.object(Meeting, "_prepared", side_effect=torch.OutOfMemoryError):
        assert meeting.compute(shares) == shares[:1]
    assert not any(one.is_done or one.error for one in shares)
    with patch.object(Meeting, "_prepared", side_effect=AssertionError):
        assert meeting.compute(shares) == shares[:1]
        # Slots that cannot grow: graphs read these.
        for one in shares:
            one.compiled._slots = Slots(on_card(one.model).description, CPU)
            one.compiled._slots.most_rows = 300
        assert Meeting().compute(shares) == shares[:1]


def test_what_is_not_offered() -> None:
    model = deep("llama")
    prompt = Prompt(model, 40, 20, 1)
    compiled = layers_over(model)
    of = RowPass(prompt.rows, prompt.fused, prompt.tables, compiled)
    given = model, range(1), prompt.hidden
    assert share_of(*given, of) is None  # nobody meets
    with Meeting().open():
        assert share_of(*given, of) is not None
        assert share_of(*given, RowPass(prompt.rows, prompt.fused, prompt.tables)) is None
        assert share_of(*given, of.over(prompt.rows.clone())) is None  # their last is not known
        with patch.object(batched_prefill, "MOST_JOINED", 19):
            assert share_of(*given, of) is None
    assert share_of(*given, of) is None
