"""Linear layers over few rows, in 8 bits and by groups, against float64, by all kernels."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrag.errors import ParameterError
from kvrag.native.kernels import instruction_sets, use_instruction_set
from kvrag.native.linear import (
    GROUP,
    MAX_INT8_INPUTS,
    MAX_ROWS,
    FewRowsLinear,
    GroupedLinear,
    GroupedWeight,
    Int8Linear,
)
from tests.support.instructions import kept_instruction_set, torch_threads
from tests.support.properties import examples


@settings(max_examples=examples(60))
@given(data=st.data())
def test_it_is_a_linear_layer(data: st.DataObject) -> None:
    draw = data.draw
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    num_rows = draw(st.integers(1, 3 * MAX_ROWS))
    num_inputs = draw(st.sampled_from([1, 3, 15, 16, 31, 32, 33, 64, 100, 576]))
    num_outputs = draw(st.sampled_from([1, 3, 4, 5, 16, 17, 33, 40, 49, 192]))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    rows = torch.randn(num_rows, num_inputs, generator=generator).to(dtype)
    weight = torch.randn(num_outputs, num_inputs, generator=generator).to(dtype)
    bias = torch.randn(num_outputs, generator=generator).to(dtype)
    given_bias = bias if draw(st.booleans()) else None
    expected = rows.double() @ weight.double().T
    if given_bias is not None:
        expected += bias.double()
    with kept_instruction_set():
        for name in instruction_sets():
            use_instruction_set(name)
            found = FewRowsLinear(weight, given_bias)(rows[None])
            assert found.shape == (1, num_rows, num_outputs)
            assert found.dtype == dtype
            # A sum is rounded once, to the type of the weights.
            tolerance = 1e-5 if dtype == torch.float32 else 2**-8
            size = rows.abs().double() @ weight.abs().double().T + 1
            close = (found[0].double() - expected).abs() <= 1e-6 * size + tolerance * expected.abs()
            assert close.all()


def assert_threads_change_nothing(layer: FewRowsLinear | Int8Linear, rows: torch.Tensor) -> None:
    found = []
    for number in (1, 2, 3):
        with torch_threads(number):
            found.append(layer(rows))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize(
    ("num_outputs", "num_rows"),
    [(16, 1), (100, 2), (24, 17), (40, MAX_ROWS), (16, 50), (100, 1), (24, MAX_ROWS), (40, 2)],
)
def test_threads_change_nothing_where_few_outputs_are_left(
    isa: str, num_outputs: int, num_rows: int
) -> None:
    generator = torch.Generator().manual_seed(1)
    # Products cancel, so that only rounding is left: another order shows in bfloat16.
    half = torch.randn(num_outputs, 8192, generator=generator)
    given = torch.randn(num_rows, 8192, generator=generator)
    weight = torch.cat([half, -half.roll(1, 1)], dim=1).bfloat16()
    rows = torch.cat([given, given.roll(1, 1)], dim=1).bfloat16()
    layer = FewRowsLinear(weight)
    assert_threads_change_nothing(layer, rows)


@pytest.mark.parametrize("num_inputs", [30, 64, 577])
def test_other_rows_do_not_change_a_rows_bits(isa: str, num_inputs: int) -> None:
    generator = torch.Generator().manual_seed(1)
    layer = FewRowsLinear(torch.randn(40, num_inputs, generator=generator).bfloat16())
    rows = torch.randn(100, num_inputs, generator=generator).bfloat16()
    together = layer(rows)
    for count in (1, 15, 16, 31, 32, 33, 47, 49, 64, 99):
        assert torch.equal(layer(rows[:count]), together[:count])
        assert torch.equal(layer(rows[-count:]), together[-count:])


@pytest.mark.parametrize(
    ("weight", "bias"),
    [
        (torch.ones(3, 2, dtype=torch.float16), None),
        (torch.ones(3), None),
        (torch.ones(2, 3).T, None),
        (torch.ones(3, 2), torch.ones(2)),
        (torch.ones(3, 2), torch.ones(3, dtype=torch.bfloat16)),
    ],
)
def test_arguments_of_another_kind(weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    with pytest.raises(ParameterError, match=r"(weight|bias):"):
        FewRowsLinear(weight, bias)
    for layer in (FewRowsLinear(torch.ones(3, 2)), Int8Linear(torch.ones(3, 2))):
        assert layer(torch.empty(1, 0, 2)).shape == (1, 0, 3)
        for rows in (torch.ones(1, 3), torch.ones(1, 2).double()):
            with pytest.raises(ParameterError, match="rows"):
                layer(rows)
    weight = torch.ones(16, 32)
    weight.untyped_storage().resize_(0)
    with pytest.raises(ParameterError, match="without"):
        FewRowsLinear(weight)


@settings(max_examples=examples(40))
@given(data=st.data())
def test_eight_bits_are_off_by_their_rounding_only(data: st.DataObject) -> None:
    """Each factor is off by at most half a step, for every instruction set."""
    draw = data.draw
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    num_rows = draw(st.sampled_from([1, 2, 5, 6, 7, 13, 100]))
    num_inputs = draw(st.sampled_from([1, 3, 4, 5, 64, 130, 576]))
    num_outputs = draw(st.sampled_from([1, 3, 63, 64, 65, 130]))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    rows = torch.randn(num_rows, num_inputs, generator=generator).to(dtype)
    weight = torch.randn(num_outputs, num_inputs, generator=generator).to(dtype)
    bias = torch.randn(num_outputs, generator=generator).to(dtype)
    given_bias = bias if draw(st.booleans()) else None
    x, w = rows.double(), weight.double()
    expected = x @ w.T
    row_step, weight_step = (one.abs().amax(1, keepdim=True) / 127 / 2 for one in (x, w))
    bound = x.abs().sum(1, keepdim=True) * weight_step.T + row_step * w.abs().sum(1)
    bound = 1.001 * (bound + num_inputs * row_step * weight_step.T) + 1e-6
    if given_bias is not None:
        expected += bias.double()
    bound += expected.abs() * (1e-5 if dtype == torch.float32 else 2**-8)
    with kept_instruction_set():
        for name in instruction_sets():
            use_instruction_set(name)
            found = Int8Linear(weight, given_bias)(rows[None])
            assert found.shape == (1, num_rows, num_outputs)
            assert found.dtype == dtype
            assert ((found[0].double() - expected).abs() <= bound).all()


def test_eight_bits_depend_on_neither_threads_nor_other_rows(isa: str) -> None:
    generator = torch.Generator().manual_seed(3)
    layer = Int8Linear(torch.randn(1001, 577, generator=generator))
    rows = torch.randn(200, 577, generator=generator)
    assert_threads_change_nothing(layer, rows)
    assert torch.equal(layer(rows), torch.cat([layer(row[None]) for row in rows]))


def test_a_row_that_is_not_finite_gives_nothing_else(isa: str) -> None:
    rows = torch.ones(3, 4)
    rows[0, 1], rows[2, 3] = float("inf"), float("nan")
    found = Int8Linear(torch.ones(2, 4))(rows)
    assert found[[0, 2]].isnan().all()
    assert torch.allclose(found[1], torch.tensor([4.0, 4.0]))
    assert Int8Linear(torch.ones(2, 4))(rows[:0]).shape == (0, 2)


@pytest.mark.parametrize(
    ("weight", "bias"),
    [
        (torch.ones(3, 2, dtype=torch.int32), None),
        (torch.ones(3), None),
        (torch.ones(3, 2), torch.ones(2)),
        (torch.ones(1, MAX_INT8_INPUTS + 1), None),
        (torch.tensor([[1.0, float("inf")]]), None),
        (torch.tensor([[1.0, float("nan")]]), None),
        (torch.ones(3, 0), None),
    ],
)
def test_weights_that_have_no_eight_bits(weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    with pytest.raises(ParameterError, match=r"(weight|bias):"):
        Int8Linear(weight, bias)


def as_numbers(
    bits: int, numbers: torch.Tensor, scale: torch.Tensor, least: torch.Tensor | None
) -> torch.Tensor:
    """Return what packed weights stand for, in float64."""
    each = GROUP // 2 if bits == 6 else GROUP
    width = numbers.shape[1]
    scales = scale.double().repeat_interleave(each, 1)[:, :width]
    if least is None:
        return (numbers.double() - 2 ** (bits - 1)) * scales
    return numbers.double() * scales + least.double().repeat_interleave(GROUP, 1)[:, :width]


@settings(max_examples=examples(60))
@given(data=st.data())
def test_weights_by_groups(data: st.DataObject) -> None:
    draw = data.draw
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    bits = draw(st.sampled_from([4, 5, 6, 8]))
    num_inputs = draw(st.sampled_from([1, 5, 31, 32, 33, 100, 288, 300, 576]))
    num_outputs = draw(st.sampled_from([1, 3, 63, 64, 65, 130]))
    num_rows = draw(st.sampled_from([1, 2, 3, 4, 7, 96, 97, 200]))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    groups = -(-num_inputs // GROUP)
    size = 10.0 ** draw(st.integers(-6, 3))
    numbers = torch.randint(0, 2**bits, (num_outputs, num_inputs), generator=generator)
    scale = torch.randn(num_outputs, groups * (2 if bits == 6 else 1), generator=generator) * size
    least = None
    if bits < 6 and draw(st.booleans()):
        least = torch.randn(num_outputs, groups, generator=generator) * size
    numbers = numbers.to(torch.uint8)
    weight = GroupedWeight.pack(bits, numbers, scale, least)
    exact = as_numbers(bits, numbers, scale, least)
    unpacked = weight.rows(torch.arange(num_outputs), torch.float32)
    # Scales are rounded to 11 bits.
    assert (unpacked - exact).abs().max() <= 2**-9 * exact.abs().max()
    bias = torch.randn(num_outputs, generator=generator) * size
    rows = torch.randn(num_rows, num_inputs, generator=generator).to(dtype)
    filled = torch.nn.functional.pad(rows.double(), (0, groups * GROUP - num_inputs))
    filled = filled.view(num_rows, groups, GROUP)
    step = filled.abs().amax(2, keepdim=True) / 127
    rounded = ((filled / step).round() * step).view(num_rows, -1)[:, :num_inputs]
    expected = rounded @ unpacked.double().T + bias.double()
    # What a number that lies between two others is rounded to may differ.
    is_between = ((filled / step % 1 - 0.5).abs() < 1e-4) * step
    slack = is_between.view(num_rows, -1)[:, :num_inputs] @ unpacked.double().abs().T
    slack += 1e-5 * expected.abs().max()
    layer = GroupedLinear(weight, bias)
    with kept_instruction_set():
        for name in instruction_sets():
            use_instruction_set(name)
            found = layer(rows)
            assert found.dtype == dtype
            tolerance = slack + (0 if dtype == torch.float32 else 2**-8 * expected.abs())
            assert ((found.double() - expected).abs() <= tolerance).all()
            assert torch.equal(layer(rows[-1:]), found[-1:])
            with torch_threads(3):
                assert torch.equal(layer(rows), found)


@pytest.mark.parametrize("shape", [(1, 1), (7, 33), (64, 576), (70, 2048)])
def test_weights_in_4_and_8_bits(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(2)).bfloat16()
    packed = GroupedWeight.quantise(weight, 4)
    values = torch.nn.functional.pad(weight.float(), (0, -shape[1] % GROUP))
    values = values.view(shape[0], -1, GROUP)
    step = ((values.amax(2) - values.amin(2)) / 15).repeat_interleave(GROUP, 1)[:, : shape[1]]
    found = packed.rows(torch.arange(shape[0]), torch.float32)
    # No worse than between a group's least and greatest.
    if shape[1] % GROUP == 0:
        least, steps = values.amin(2, keepdim=True), step.view(values.shape)
        plain = ((values - least) / steps).round() * steps + least
        assert (found - weight).norm() <= 1.001 * (plain.view(shape) - weight).norm()
    assert ((found - weight.float()).abs() <= 1.6 * step + 2e-3 * weight.abs().max()).all()
    exact = GroupedWeight.quantise(weight, 8).rows(torch.arange(shape[0]), torch.float32)
    assert ((exact - weight.float()).abs() <= 0.01 * weight.abs().max()).all()
    some = torch.tensor([[shape[0] - 1], [0]])
    assert torch.equal(packed.rows(some, torch.float32), found[some])
    assert torch.equal(packed.rows(some, torch.bfloat16), found[some].bfloat16())


def test_rows_that_are_not_finite_give_nan_and_zeros_give_the_bias_by_groups() -> None:
    layer = GroupedLinear(GroupedWeight.quantise(torch.randn(5, 40), 4), torch.arange(5.0))
    rows = torch.randn(4, 40)
    rows[1, 3], rows[2, 39], rows[3] = float("inf"), float("nan"), 0
    with kept_instruction_set():
        for name in instruction_sets():
            use_instruction_set(name)
            found = layer(rows)
            assert found[0].isfinite().all()
            assert found[1:3].isnan().all()
            assert torch.equal(found[3], torch.arange(5.0))


def test_what_groups_cannot_hold() -> None:
    with pytest.raises(ParameterError, match="weight: expected finite"):
        GroupedWeight.quantise(torch.tensor([[1.0, float("inf")]]), 4)
    packed = GroupedWeight.quantise(torch.randn(4, 40), 4)
    with pytest.raises(ParameterError, match="outputs: expected numbers below 4"):
        packed.rows(torch.tensor([4]), torch.float32)
    with pytest.raises(ParameterError, match="rows: expected"):
        packed.rows(torch.tensor([0]), torch.float16)
    layer = GroupedLinear(packed)
    for rows in (torch.randn(2, 41), torch.randn(2, 40).half()):
        with pytest.raises(ParameterError, match="rows: expected"):
            layer(rows)
    for wrong in (
        packed._replace(bits=5),
        packed._replace(shape=(4, 70)),
        packed._replace(scale=packed.scale.float()),
        packed._replace(least=packed.scale),
    ):
        with pytest.raises(ParameterError, match="expected"):
            GroupedLinear(wrong)
    with pytest.raises(ParameterError, match="bias: expected"):
        GroupedLinear(packed, torch.randn(3))
