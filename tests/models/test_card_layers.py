"""A layer's operations, carried out as on a card: by PyTorch, and by interpreted kernels."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import pytest
import torch

from kvrag.kvcache import FusedKV
from kvrag.models import cardlayers
from kvrag.models.attention import MassObserver
from kvrag.models.cardlayers import CardLayers
from kvrag.models.compiled import Description, describe_layers
from kvrag.models.kv_model import KVModel
from kvrag.models.rows import Attending, RowPass
from kvrag.native.gpu import tiled
from kvrag.native.gpu.rows import RowKernels, RowOperations, RowPlaces, RowTensors
from tests.models.test_compiled import FAMILIES, model_of
from tests.support.properties import few

NUM_TOKENS, FIRST_LAYER, QUESTION = 70, 1, 50
POLICIES = ["none", "boundary", "random", "deviation", "query", "two_stage", "gradual"]


def on_card(model: KVModel) -> CardLayers:
    described = describe_layers(model.rows.layers, model.windows, model._any_tables())
    return CardLayers(described)


def by_tensors(places: RowPlaces, _: Description) -> RowOperations:
    return RowTensors(places)


def rows_of_prompt(
    model: KVModel, compiled: CardLayers | None, num_rows: int, **attending: Any
) -> tuple[torch.Tensor, FusedKV, torch.Tensor]:
    """Return rows after all layers, the prompt's KV, and what its keys got times their norms."""
    fused = FusedKV(model.spec, NUM_TOKENS, NUM_TOKENS + 4)
    torch.manual_seed(0)
    fused.storage.normal_()
    for kv in (*fused.keys, *fused.values):  # a masked weight is 0, and 0 times NaN is NaN
        kv[:, :, NUM_TOKENS:] = torch.nan
    others = torch.randperm(NUM_TOKENS - 1)[: num_rows - 1]
    rows = torch.cat([others, torch.tensor([NUM_TOKENS - 1])]).sort().values
    tables = model.tables(NUM_TOKENS, [*range(40), *range(43, NUM_TOKENS + 3)])
    taken = torch.zeros(model.spec.num_layers, NUM_TOKENS)
    layer = 0

    def note(mask: Any, mass: torch.Tensor, value: torch.Tensor) -> None:
        seen = slice(mask.first_key, mask.first_key + mass.shape[1])
        taken[layer, seen] += (mass * value.float().norm(dim=-1)).sum(0)

    observer = MassObserver(QUESTION, note, (taken[FIRST_LAYER:], FIRST_LAYER))
    with model.computing_rows():
        hidden = model.embed(torch.arange(num_rows) + 9)
        of = RowPass(rows, fused, tables, compiled)
        for layer in range(model.spec.num_layers):
            looks = Attending(
                **{"observer": observer if layer >= FIRST_LAYER else None, **attending}
            )
            model.rows.forward(layer, hidden, of, attending=looks)
    return hidden, fused, taken


@pytest.mark.parametrize("num_rows", few(2, [3, 70, 33]))
@pytest.mark.parametrize("family", FAMILIES)
def test_operations_in_pytorch_compute_what_modules_do(family: str, num_rows: int) -> None:
    model = model_of(family)
    expected, theirs, their_mass = rows_of_prompt(model, None, num_rows)
    with (
        patch.object(cardlayers, "operations_for", by_tensors),
        patch.object(model.rows, "_run", side_effect=AssertionError("a module ran")),
    ):
        found, ours, our_mass = rows_of_prompt(model, on_card(model), num_rows)
    assert ((found - expected).abs() <= 1e-5 * expected.std()).all()
    for mine, others in zip(ours.keys + ours.values, theirs.keys + theirs.values, strict=True):
        # Sums of other kernels round otherwise: 1.6e-5 apart at most, under the scalar ones.
        torch.testing.assert_close(mine, others, rtol=1e-5, atol=4e-5, equal_nan=True)
    if family != "gemma2":  # the modules' look leaves soft-capping out
        torch.testing.assert_close(our_mass, their_mass, rtol=1e-4, atol=1e-4)


def test_a_last_look_ends_after_its_attention() -> None:
    model = model_of()
    with patch.object(cardlayers, "operations_for", by_tensors):
        found, _, mass = rows_of_prompt(model, on_card(model), 20, stops=True)
    with model.computing_rows():
        assert torch.equal(found, model.embed(torch.arange(20) + 9))
    assert bool(mass[FIRST_LAYER:].any())


def test_more_rows_than_are_computed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    expected, theirs, their_mass = rows_of_prompt(model, None, 70)
    monkeypatch.setattr("kvrag.models.cardlayers.MOST_ROWS", 32)
    with patch.object(cardlayers, "operations_for", by_tensors):
        found, ours, our_mass = rows_of_prompt(model, on_card(model), 70)
    assert ((found - expected).abs() <= 1e-5 * expected.std()).all()
    torch.testing.assert_close(our_mass, their_mass, rtol=1e-4, atol=1e-4)
    assert torch.equal(ours.storage.isnan(), theirs.storage.isnan())


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="no Triton")
def test_kernels_that_are_wrong_are_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cardlayers, "_CHECKED_TOKENS", 60)
    monkeypatch.setattr(cardlayers, "_CHECKED_ROWS", 9)
    monkeypatch.setattr(tiled, "_trusted", {})
    described = on_card(model_of("gemma3")).description
    assert cardlayers.is_right(described, torch.device("cpu"))
    monkeypatch.setattr(tiled, "_trusted", {})
    attend = RowKernels.attend

    def beside(self: Any, query: torch.Tensor, out: torch.Tensor, *more: Any) -> None:
        attend(self, query, out, *more)
        out[3] += 1

    monkeypatch.setattr(RowKernels, "attend", beside)
    for _ in range(2):
        assert not cardlayers.is_right(described, torch.device("cpu"))
    assert len(caplog.records) == 1
    assert "off by" in caplog.text
    monkeypatch.setattr(tiled, "_trusted", {})
    monkeypatch.setattr(RowKernels, "attend", lambda *_: 1 / 0)
    assert not cardlayers.is_right(described, torch.device("cpu"))
    assert "division by zero" in caplog.text
    # Many rows have a kernel of their own.
    monkeypatch.setattr(tiled, "_trusted", {})
    monkeypatch.setattr(RowKernels, "attend", attend)
    start = RowKernels._start

    def some(self: Any, name: str, *more: Any, **constants: int) -> None:
        if constants.get("WHOLE"):
            raise RuntimeError("out of shared memory")
        start(self, name, *more, **constants)

    monkeypatch.setattr(RowKernels, "_start", some)
    assert not cardlayers.is_right(described, torch.device("cpu"))
    assert "out of shared memory" in caplog.text


def test_layers_with_three_tables_are_left_to_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cardlayers, "is_right", lambda *_: True)
    monkeypatch.setattr(cardlayers, "are_ready", lambda *_: True)
    described = on_card(model_of("gemma3")).description
    given = torch.device("cpu"), described.head_dim
    assert cardlayers.on_card(described, *given)
    assert not cardlayers.on_card(replace(described, tables=(0, 1, 2)), *given)


def test_kernels_get_positions_that_are_aligned() -> None:
    described = on_card(model_of()).description
    kv, table = torch.zeros(1, 12, described.head_dim), torch.zeros(12, described.head_dim)
    for first in range(2):
        rows = torch.arange(12)[first:]
        places = RowPlaces(rows, len(rows), [(table, table)], kv[None], kv[None], 11)
        operations = cardlayers.operations_for(places, described)
        assert isinstance(operations, RowKernels)
        assert operations._positions.data_ptr() % 16 == 0
        assert torch.equal(operations._positions, rows)
