"""Operations of `RowLayers`: each is the function that it names, and bad arguments are told."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from kvrag.errors import ParameterError
from kvrag.native.attention import Buffers, Mass, Scores, attend, attend_each
from kvrag.native.kernels import IS_COMPILED
from kvrag.native.linear import FewRowsLinear, Int8Linear, RowLayers
from kvrag.native.reconstruction import gated, rms_norm, rotate

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
@pytest.mark.parametrize("num_rows", [NUM_ROWS, 40])
def test_layers_are_the_functions_that_they_name(
    num_rows: int, dtype: torch.dtype, isa: str
) -> None:
    """Two layers, 6 heads over 2 key heads: a row of each of 3 prompts, or rows all over one."""
    made = partial(numbers, dtype=dtype)
    of_rows, of_heads, bias = made(WIDTH), made(HEAD_DIM, seed=1), made(WIDTH, seed=2)
    to_query, to_key, to_value = made(80, WIDTH, seed=3).split([WIDTH, 16, 16])
    to_up, down = made(70, WIDTH, seed=8), Int8Linear(made(WIDTH, 70, seed=4))
    to_gate = Int8Linear(made(70, WIDTH, seed=5))
    tables = [tuple(numbers(2, num_rows, 6, dtype=torch.float32, seed=one)) for one in (9, 10)]
    scores = Scores(0.3, window=7), Scores(0.3, 5.0, 30)
    layers = RowLayers(dtype, WIDTH)
    widths = WIDTH, WIDTH, WIDTH, 16, 16, 16, 70, 70
    normed, query, asked, key, turned, value, gate, up = map(layers.add_slot, widths)
    for layer in range(2):
        layers.norm(0, normed, of_rows, 1e-5, adds_one=False)
        layers.linear(normed, query, to_query, bias)
        layers.linear(normed, key, to_key, None)
        layers.linear(normed, value, to_value, None)
        for one, other in ((query, asked), (key, turned)):
            layers.norm(one, other, of_heads, 1e-6, adds_one=True)
            layers.rotate(other, one, layer, HEAD_DIM)
        layers.attend(query, key, value, asked, HEAD_DIM, scores[layer])
        layers.add(0, asked, 0)
        layers.quantised_linear(asked, gate, to_gate)
        layers.linear(asked, up, to_up, None)
        layers.gate(gate, up, up, is_gelu=layer == 1)
        layers.quantised_linear(up, normed, down)
        layers.add(0, normed, 0)
        layers.end_layer()

    rows = made(num_rows, WIDTH, seed=6)
    buffers = made(2, 2, NUM_ROWS, 2, 70, HEAD_DIM, seed=7)  # part, layer, prompt, head, row
    copies, capacities = buffers.clone(), np.full(NUM_ROWS, 70)
    places = np.sort(np.random.default_rng(0).choice(65, num_rows, replace=False))
    found, expected = rows.clone(), rows
    if num_rows == NUM_ROWS:
        at = [[[one.data_ptr() for one in layer] for layer in part] for part in buffers]
        layers.run(found, tables, np.array(at), capacities, PLACES)
    for layer in range(2):
        inputs = rms_norm(expected, of_rows, 1e-5)
        turns = []
        for linear in (FewRowsLinear(to_query, bias), FewRowsLinear(to_key)):
            heads = linear(inputs).view(num_rows, -1, HEAD_DIM)
            heads = rms_norm(heads, of_heads, 1e-6, adds_one=True).transpose(0, 1).contiguous()
            turns.append(torch.empty_like(heads))
            assert rotate(heads, *tables[layer], turns[-1])
        values = FewRowsLinear(to_value)(inputs).view(num_rows, -1, HEAD_DIM).transpose(0, 1)
        if num_rows == NUM_ROWS:
            at = [np.array([one.data_ptr() for one in part[layer]]) for part in copies]
            to = Buffers(*at, capacities, PLACES)
            gathered = attend_each(*turns, values, to, scores[layer])
        else:
            # Behind 5 keys that no row sees.
            kv, copied = (given[:, layer, 0, :, 5:] for given in (buffers, copies))
            masses = [Mass(torch.full((2, 65), torch.nan), 7) for _ in range(2)]
            layers.run_layer(layer, found, tables[layer], kv, places, masses[0])
            copied[0][:, places], copied[1][:, places] = turns[1], values
            gathered = attend(turns[0], *copied, places, scores[layer], mass=masses[1])
            assert torch.equal(masses[0].out, masses[1].out)
        gathered = gathered.view(num_rows, WIDTH)
        raised = FewRowsLinear(to_up)(gathered)
        expected = expected + gathered + down(gated(to_gate(gathered), raised, is_gelu=layer == 1))
    assert torch.equal(found, expected)
    assert torch.equal(buffers, copies)


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
