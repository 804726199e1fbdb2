"""Operations of `RowLayers`: each is the function that it names, and bad arguments are told."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvrag.errors import ParameterError
from kvrag.native import (
    IS_COMPILED,
    Buffers,
    FewRowsLinear,
    Int8Linear,
    Mass,
    RowLayers,
    Scores,
    attend,
    attend_each,
    gated,
    rms_norm,
    rotate,
)

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


@both_types
def test_linear_layers(dtype: torch.dtype, isa: str) -> None:
    rows = numbers(NUM_ROWS, WIDTH, dtype=dtype)
    up, bias = numbers(70, WIDTH, dtype=dtype, seed=1), numbers(70, dtype=dtype, seed=2)
    down = Int8Linear(numbers(WIDTH, 70, dtype=dtype, seed=3))
    layers = RowLayers(dtype, WIDTH)
    wide = layers.add_slot(70)
    layers.linear(0, wide, up, bias)
    layers.quantised_linear(wide, 0, down)
    assert torch.equal(result(layers, rows), down(FewRowsLinear(up, bias)(rows)))


@both_types
def test_norms_gates_and_sums(dtype: torch.dtype, isa: str) -> None:
    rows = numbers(NUM_ROWS, WIDTH, dtype=dtype)
    weight, of_heads = numbers(WIDTH, dtype=dtype, seed=1), numbers(HEAD_DIM, dtype=dtype, seed=2)
    layers = RowLayers(dtype, WIDTH)
    one, other, third = (layers.add_slot(WIDTH) for _ in range(3))
    layers.norm(0, one, weight, 1e-5, adds_one=False)
    layers.norm(one, other, of_heads, 1e-6, adds_one=True)
    layers.gate(one, other, third, is_gelu=True)
    layers.add(0, third, 0)
    normed = rms_norm(rows, weight, 1e-5)
    heads = rms_norm(normed.view(NUM_ROWS, -1, HEAD_DIM), of_heads, 1e-6, adds_one=True)
    expected = rows + gated(normed, heads.view(NUM_ROWS, WIDTH), is_gelu=True)
    assert torch.equal(result(layers, rows), expected)


@both_types
def test_attention(dtype: torch.dtype, isa: str) -> None:
    """Two layers of 6 heads over 2 key heads, with a table each."""
    rows = numbers(NUM_ROWS, WIDTH, dtype=dtype)
    to_keys = [numbers(16, WIDTH, dtype=dtype, seed=seed) for seed in range(4)]
    buffers = [numbers(2, 2, 2, CAPACITY, HEAD_DIM, dtype=dtype, seed=9 + i) for i in range(3)]
    copies = [one.clone() for one in buffers]
    tables = [
        tuple(numbers(NUM_ROWS, 6, dtype=torch.float32, seed=i) for i in (j, j + 1))
        for j in (20, 30)
    ]
    layers = RowLayers(dtype, WIDTH)
    asked, keys, turned, values = (layers.add_slot(width) for width in (WIDTH, 16, 16, 16))
    scores = Scores(0.3, window=7), Scores(0.3, 5.0)
    for layer in range(2):
        layers.linear(0, keys, to_keys[2 * layer], None)
        layers.linear(0, values, to_keys[2 * layer + 1], None)
        layers.rotate(0, asked, layer, HEAD_DIM)
        layers.rotate(keys, turned, layer, HEAD_DIM)
        layers.attend(
            asked,
            turned,
            values,
            0,
            HEAD_DIM,
            scores[layer],
        )
        layers.end_layer()
    addresses = np.array(
        [[[b[part, layer].data_ptr() for b in buffers] for layer in range(2)] for part in range(2)]
    )
    found = rows.clone()
    layers.run(found, tables, addresses, CAPACITIES, PLACES)

    expected = rows
    for layer in range(2):
        at = [np.array([b[part, layer].data_ptr() for b in copies]) for part in range(2)]
        turns = []
        for given in (expected, FewRowsLinear(to_keys[2 * layer])(expected)):
            heads = given.view(NUM_ROWS, -1, HEAD_DIM).transpose(0, 1).contiguous()
            turns.append(torch.empty_like(heads))
            assert rotate(heads, *tables[layer], turns[-1])
        value = FewRowsLinear(to_keys[2 * layer + 1])(expected)
        expected = attend_each(
            *turns,
            value.view(NUM_ROWS, -1, HEAD_DIM).transpose(0, 1),
            Buffers(*at, CAPACITIES, PLACES),
            scores[layer],
        ).view(NUM_ROWS, WIDTH)
    assert torch.equal(found, expected)
    assert all(torch.equal(one, other) for one, other in zip(buffers, copies, strict=True))


@both_types
@pytest.mark.parametrize("first_key", [0, 5])
def test_rows_of_one_prompt(dtype: torch.dtype, first_key: int, isa: str) -> None:
    """The second of two layers writes rows anywhere in a buffer, and attends there."""
    num_rows = 40
    rows = numbers(num_rows, WIDTH, dtype=dtype)
    to_keys, to_values = (numbers(16, WIDTH, dtype=dtype, seed=seed) for seed in (1, 2))
    table = tuple(numbers(num_rows, 6, dtype=torch.float32, seed=i) for i in (3, 4))
    places = np.sort(np.random.default_rng(0).choice(60, num_rows, replace=False)) + first_key
    buffer = numbers(2, 2, 90, HEAD_DIM, dtype=dtype, seed=5)
    copied = buffer.clone()
    shown = slice(first_key, int(places[-1]) + 1)
    layers = RowLayers(dtype, WIDTH)
    asked, keys, turned, values = (layers.add_slot(width) for width in (WIDTH, 16, 16, 16))
    layers.add(0, 0, 0)
    layers.end_layer()
    layers.linear(0, keys, to_keys, None)
    layers.linear(0, values, to_values, None)
    layers.rotate(0, asked, 0, HEAD_DIM)
    layers.rotate(keys, turned, 0, HEAD_DIM)
    layers.attend(asked, turned, values, 0, HEAD_DIM, Scores(0.3, 5.0, 30))
    layers.end_layer()
    found = rows.clone()
    mass = torch.full((2, shown.stop - first_key), torch.nan)
    layers.run_layer(
        1,
        found,
        table,
        (buffer[0][:, shown], buffer[1][:, shown]),
        places - first_key,
        Mass(mass, 7),
    )

    turns = []
    for given in (rows, FewRowsLinear(to_keys)(rows)):
        heads = given.view(num_rows, -1, HEAD_DIM).transpose(0, 1).contiguous()
        turns.append(torch.empty_like(heads))
        assert rotate(heads, *table, turns[-1])
    copied[0][:, places] = turns[1]
    copied[1][:, places] = FewRowsLinear(to_values)(rows).view(num_rows, 2, -1).transpose(0, 1)
    expected_mass = torch.empty_like(mass)
    expected = attend(
        turns[0],
        *copied[:, :, shown],
        places - first_key,
        Scores(0.3, 5.0, 30),
        mass=Mass(expected_mass, 7),
    )
    assert torch.equal(found, expected.view(num_rows, WIDTH))
    assert torch.equal(buffer, copied)
    assert torch.equal(mass, expected_mass)


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


def test_a_layer_attends_once() -> None:
    layers, slot = made()
    keys, values = layers.add_slot(16), layers.add_slot(16)
    layers.attend(0, keys, values, slot, **ATTENDING)
    with pytest.raises(ParameterError, match="once"):
        layers.attend(0, keys, values, slot, **ATTENDING)
    layers.end_layer()
    layers.attend(0, keys, values, slot, **ATTENDING)


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


def test_what_no_layer_ends_is_not_computed() -> None:
    layers, _ = made()
    layers.add(0, 0, 0)
    layers.end_layer()
    layers.add(0, 0, 0)
    rows = torch.ones(NUM_ROWS, WIDTH)
    layers.run(rows, [], NO_BUFFERS, CAPACITIES, PLACES)
    assert torch.equal(rows, torch.full((NUM_ROWS, WIDTH), 2.0))


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
        (lambda layers, slot: layers.gate(0, slot, layers.add_slot(3), is_gelu=False), "widths"),
        (lambda layers, slot: layers.add(0, slot, layers.add_slot(3)), "widths"),
        (lambda layers, slot: layers.rotate(0, slot, 0, 7), "head_dim"),
        (lambda layers, slot: layers.attend(0, slot, slot, 0, **ATTENDING), "slot 0"),
        (lambda layers, slot: layers.attend(0, *[narrow(layers)] * 2, slot, **ATTENDING), "heads"),
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
        ({"tables": []}, "tables: expected 1"),
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
