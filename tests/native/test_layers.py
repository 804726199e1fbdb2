"""Operations of `RowLayers`: each is the function that it names, and bad arguments are told."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvrag.errors import ParameterError
from kvrag.native.attention import Mass, Scores
from kvrag.native.kernels import IS_COMPILED
from kvrag.native.linear import Int8Linear, RowLayers

pytestmark = pytest.mark.skipif(not IS_COMPILED, reason="nothing is compiled")

WIDTH, HEAD_DIM, NUM_ROWS, CAPACITY = 48, 8, 3, 40
PLACES = np.array([11, 39, 0])
CAPACITIES = np.full(NUM_ROWS, CAPACITY)
NO_BUFFERS = np.zeros((2, 1, NUM_ROWS), np.int64)

both_types = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def numbers(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def result(layers: RowLayers, rows: torch.Tensor) -> torch.Tensor:
    found = rows.clone()
    layers.end_layer()
    layers.run(found, [], NO_BUFFERS, CAPACITIES, PLACES)
    return found


HEADS = torch.zeros(2, 2, CAPACITY, HEAD_DIM)
ONE_PROMPT = np.array([3, 7, 9])


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"layer": 1}, "layer 1: expected one of 1"),
        ({"layer": -1}, "layer -1"),
        ({"kv": (HEADS[0, :1], HEADS[1])}, "keys"),
        ({"kv": (HEADS[0], HEADS[1, :, 1:])}, "values"),
        ({"kv": (HEADS[0].bfloat16(), HEADS[1])}, "keys: expected torch.float32"),
        ({"kv": (HEADS[0], HEADS[1].transpose(0, 1).contiguous().transpose(0, 1))}, "strides"),
        ({"table": (torch.ones(2, HEAD_DIM),) * 2}, "tables"),
        ({"table": (torch.ones(NUM_ROWS, 10),) * 2}, "at most 8, found 10"),
        ({"places": ONE_PROMPT[::-1].copy()}, "places: expected ascending"),
        ({"places": np.array([3, 3, 9])}, "places: expected ascending"),
        ({"places": ONE_PROMPT - 4}, "places: expected ascending"),
        ({"places": ONE_PROMPT + CAPACITY}, "places: expected ascending"),
        ({"places": ONE_PROMPT.astype(np.int32)}, "places"),
        ({"mass": Mass(torch.zeros(2, 3))}, "mass"),
    ],
)
def test_rows_of_one_prompt_that_do_not_fit(given: dict[str, Any], told: str) -> None:
    layers, slot = made()
    keys, values = layers.add_slot(16), layers.add_slot(16)
    layers.rotate(0, slot, 0, HEAD_DIM)
    layers.attend(slot, keys, values, 0, **ATTENDING)
    layers.end_layer()
    right: dict[str, Any] = {
        "layer": 0,
        "table": (torch.ones(NUM_ROWS, HEAD_DIM),) * 2,
        "kv": HEADS,
        "places": ONE_PROMPT,
    }
    rows = torch.ones(NUM_ROWS, WIDTH)
    layers.run_layer(hidden=rows, **right)
    with pytest.raises(ValueError, match=told):
        layers.run_layer(hidden=rows, **{**right, **given})


def test_without_rows_keys_get_nothing() -> None:
    layers, slot = made()
    keys, values = layers.add_slot(16), layers.add_slot(16)
    layers.attend(0, keys, values, slot, **ATTENDING)
    layers.rotate(slot, 0, 0, HEAD_DIM)
    layers.end_layer()
    mass = torch.ones(2, CAPACITY)
    none, places = torch.ones(0, HEAD_DIM), np.zeros(0, np.int64)
    rows = torch.ones(0, WIDTH)
    layers.run_layer(0, rows, (none, none), HEADS, places, Mass(mass))
    assert not mass.any()


def test_a_layer_attends_once() -> None:
    layers, slot = made()
    layers.attend(0, slot, slot, slot, **ATTENDING)
    with pytest.raises(ParameterError, match="once"):
        layers.attend(0, slot, slot, slot, **ATTENDING)
    layers.end_layer()
    layers.attend(0, slot, slot, slot, **ATTENDING)


def made() -> tuple[RowLayers, int]:
    layers = RowLayers(torch.float32, WIDTH)
    return layers, layers.add_slot(WIDTH)


def narrow(layers: RowLayers) -> int:
    return layers.add_slot(5)


SQUARE = torch.ones(WIDTH, WIDTH)
EIGHTS = Int8Linear(torch.ones(3, 4))
ATTENDING: dict[str, Any] = {"head_dim": 8, "scores": Scores(1.0)}


@pytest.mark.parametrize(
    ("act", "told"),
    [
        (lambda layers, slot: layers.linear(0, 0, SQUARE, None), "slot 0"),
        (lambda layers, slot: layers.linear(0, slot, torch.ones(3, WIDTH), None), "weight"),
        (lambda layers, slot: layers.linear(0, slot, SQUARE.bfloat16(), None), "weight"),
        (lambda layers, slot: layers.linear(0, slot, SQUARE, torch.ones(3)), "bias"),
        (lambda layers, slot: layers.quantised_linear(0, slot, EIGHTS), "layer"),
        (lambda layers, slot: layers.norm(0, slot, torch.ones(5), 1.0, adds_one=False), "weight"),
        (lambda layers, slot: layers.norm(0, narrow(layers), SQUARE[0], 1.0, adds_one=False), "w"),
        (lambda layers, slot: layers.gate(0, slot, narrow(layers), is_gelu=False), "widths"),
        (lambda layers, slot: layers.add(0, slot, narrow(layers)), "widths"),
        (lambda layers, slot: layers.rotate(0, slot, 0, 7), "head_dim"),
        (lambda layers, slot: layers.rotate(0, narrow(layers), 0, 8), "widths"),
        (lambda layers, slot: layers.attend(0, slot, slot, 0, **ATTENDING), "slot 0"),
        (lambda layers, slot: layers.attend(0, slot, narrow(layers), slot, **ATTENDING), "widths"),
        (lambda layers, slot: layers.attend(0, *[narrow(layers)] * 2, slot, **ATTENDING), "h"),
        (lambda layers, slot: layers.attend(0, 0, 0, slot, 8, Scores(1.0, window=0)), "window"),
        (lambda layers, slot: layers.attend(0, 0, 0, slot, 8, Scores(-1.0)), "scale"),
        (lambda layers, slot: result(layers, torch.ones(2, WIDTH)), "hidden"),
        (lambda layers, slot: result(layers, torch.ones(NUM_ROWS, WIDTH).bfloat16()), "hidden"),
        (lambda layers, slot: RowLayers(torch.float16, 3), "dtype"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit(act: Callable[[RowLayers, int], None], told: str) -> None:
    with pytest.raises(ParameterError, match=told):
        act(*made())


TABLE = (torch.ones(NUM_ROWS, HEAD_DIM), torch.ones(NUM_ROWS, HEAD_DIM))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"tables": []}, r"tables: expected shape \[1\]"),
        ({"tables": [(TABLE[0], TABLE[1].double())]}, "tables"),
        ({"tables": [(TABLE[0], TABLE[1][:, :6])]}, "tables"),
        ({"tables": [(TABLE[0][:2], TABLE[1][:2])]}, "tables"),
        ({"tables": [(torch.ones(NUM_ROWS, 10),) * 2]}, "at most 8, found 10"),
        ({"tables": [(torch.ones(NUM_ROWS, 7),) * 2]}, "even"),
        ({"tables": [(torch.ones(8, NUM_ROWS).T,) * 2]}, "contiguous"),
        ({"places": PLACES + 1}, "places: expected rows of buffers"),
        ({"places": PLACES - 1}, "places: expected rows of buffers"),
        ({"places": PLACES.astype(np.int32)}, "places"),
        ({"capacities": CAPACITIES[:2]}, "capacities"),
        ({"addresses": np.zeros((2, 0, 3), np.int64)}, "addresses"),
    ],
)
def test_rows_that_do_not_fit(given: dict[str, Any], told: str) -> None:
    layers, slot = made()
    layers.rotate(0, slot, 0, HEAD_DIM)
    layers.end_layer()
    right: dict[str, Any] = {
        "tables": [TABLE],
        "addresses": NO_BUFFERS,
        "capacities": CAPACITIES,
        "places": PLACES,
    }
    rows = torch.ones(NUM_ROWS, WIDTH)
    layers.run(rows, **right)
    with pytest.raises(ValueError, match=told):
        layers.run(rows, **{**right, **given})


@both_types
def test_nothing_is_computed_for_no_rows(dtype: torch.dtype, isa: str) -> None:
    layers = RowLayers(dtype, WIDTH)
    slot = layers.add_slot(WIDTH)
    layers.linear(0, slot, torch.ones(WIDTH, WIDTH, dtype=dtype), None)
    layers.add(0, slot, 0)
    none = np.zeros(0, np.int64)
    rows = torch.ones(0, WIDTH, dtype=dtype)
    layers.end_layer()
    layers.run(rows, [], np.zeros((2, 1, 0), np.int64), none, none)
