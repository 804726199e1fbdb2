"""Reconstruction against plain torch, for every instruction set."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrag.errors import ParameterError, RecordError
from kvrag.native.kernels import instruction_sets, use_instruction_set
from kvrag.native.reconstruction import Patches, Points, Rotation, contexts, reconstruct, refine
from tests.native.reference_reconstruction import transformed
from tests.support.instructions import kept_instruction_set, torch_threads
from tests.support.properties import examples

RELATIVE = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def make_numbers(
    generator: torch.Generator, shape: tuple[int, int], dtype: torch.dtype, density: float
) -> torch.Tensor:
    """Return numbers of which about `density` are not zero, some rows and tokens entirely."""
    limit = 128 if dtype == torch.uint8 else 2000
    found = torch.randint(-limit, limit, shape, generator=generator)
    found[torch.rand(shape, generator=generator) >= density] = 0
    return (found + (128 if dtype == torch.uint8 else 0)).to(dtype)


def make_patches(generator: torch.Generator, shape: tuple[int, int], count: int) -> Patches:
    places = torch.randperm(shape[0] * shape[1], generator=generator)[:count].sort().values
    tokens, rows = places // shape[0], places % shape[0]
    values = torch.randn(len(places), generator=generator) * 300
    return Patches(rows.numpy().astype(np.uint32), tokens.numpy().astype(np.uint32), values.numpy())


def make_rotation(
    generator: torch.Generator, num_tokens: int, width: int
) -> Rotation[torch.Tensor]:
    angles = torch.rand(num_tokens, width, generator=generator) * 7
    return Rotation(angles.cos(), angles.sin())


def assert_close(found: torch.Tensor, expected: torch.Tensor, scale: float) -> None:
    """Compare up to rounding to the type, and sums of numbers of magnitude `scale`."""
    allowed = expected.abs() * RELATIVE[found.dtype] + scale * 1e-5
    if found.dtype == torch.float16:
        allowed += 2**-24
    assert (found.double() - expected).abs().le(allowed).all()


@settings(max_examples=examples(60))
@given(data=st.data())
def test_transform_matches_torch(data: st.DataObject) -> None:
    draw = data.draw
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    num_heads, num_rows = draw(st.integers(1, 3)), draw(st.integers(0, 40))
    num_tokens = draw(st.sampled_from([1, 7, 8, 9, 31, 32, 33, 100]))
    head_dim = draw(st.sampled_from([1, 6, 8, 16, 24, 32, 40, 64, 80, 128, 256]))
    start = draw(st.integers(0, num_tokens))
    tokens = slice(start, draw(st.integers(start, num_tokens)))
    count = tokens.stop - tokens.start
    numbers = make_numbers(
        generator,
        (num_rows, num_tokens),
        draw(st.sampled_from([torch.uint8, torch.int16])),
        draw(st.sampled_from([0.0, 0.02, 1.0])),
    )
    shrink = torch.rand(num_rows, generator=generator) * 0.4
    basis = torch.randn(num_heads, num_rows, head_dim, generator=generator)
    mean = torch.randn(num_heads, head_dim, generator=generator)
    options: dict[str, Any] = {"tokens": tokens}
    if draw(st.booleans()):
        width = draw(st.integers(0, head_dim // 2)) * 2
        options["rotation"] = make_rotation(generator, count, width)
    patches = None
    if draw(st.booleans()):
        patches = make_patches(generator, (num_rows, num_tokens), 50)
    points = Points(numbers, shrink, patches)
    dtype = draw(st.sampled_from(list(RELATIVE)))
    if dtype == torch.float16:
        basis /= 100  # its range ends at 65504
    expected = transformed(points, basis, mean, **options)
    scale = 40.0 * float(numbers.double().abs().max() if numbers.numel() else 1) + 300
    with kept_instruction_set():
        for name in instruction_sets():
            use_instruction_set(name)
            buffer = torch.full((count + 2, num_heads + 1, head_dim), 5.0, dtype=dtype)
            out = buffer[1 : count + 1, :num_heads].transpose(0, 1)
            reconstruct(points, basis, mean, out, **options)
            assert_close(out, expected, scale)
            out.fill_(5.0)
            assert (buffer == 5.0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_torch_s(dtype: torch.dtype, isa: str) -> None:
    """Every exponent, halfway cases, subnormals, overflow, infinity."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (8, 4096), generator=generator).to(torch.int32)
    bits[0] &= -8192  # ties of float16
    bits[1] &= -65536
    bits[2] = (bits[2] & -65536) + 0x8000  # ties of bfloat16
    bits[3] = (bits[3] & 0x0FFFFFFF) + 0x30000000  # around float16's subnormals and ones
    values = bits.view(torch.float32)
    values[4, :4] = torch.tensor([65519.9, 65520.0, float("inf"), -float("inf")])
    values = torch.where(values.isnan(), torch.zeros(()), values)
    out = torch.empty(8, 1, 4096, dtype=dtype)
    zero, basis = Points(torch.full((1, 1), 128, dtype=torch.uint8)), torch.zeros(8, 1, 4096)
    reconstruct(zero, basis, values, out)
    # Zero is added to the mean, which takes the sign off a negative zero.
    expected = (values + 0.0).to(dtype).view(torch.int16)
    assert torch.equal(out[:, 0].view(torch.int16), expected)
    reconstruct(zero, basis, torch.full((8, 4096), float("nan")), out)
    assert out.isnan().all()


def test_threads_change_nothing(isa: str) -> None:
    generator = torch.Generator().manual_seed(3)
    numbers = make_numbers(generator, (300, 400), torch.uint8, 0.5)
    basis = torch.randn(4, 300, 64, generator=generator)
    outs = [torch.empty(4, 400, 64) for _ in range(2)]
    for threads, out in zip((1, 3), outs, strict=True):
        with torch_threads(threads):
            reconstruct(Points(numbers), basis, None, out)
    assert torch.equal(*outs)


def test_numpy_and_torch_are_alike() -> None:
    numbers = np.full((2, 5), 130, np.uint8)
    out = np.empty((1, 5, 8), np.float16)
    reconstruct(Points(numbers), np.full((1, 2, 8), 0.25, np.float32), None, out)
    assert (out == 1).all()


def test_digits_and_contexts(isa: str) -> None:
    generator = torch.Generator().manual_seed(5)
    values = torch.randint(-3, 4, (7, 61), generator=generator).to(torch.int16)
    context = torch.empty(7, 61, dtype=torch.uint8)
    contexts(values, context)
    assert torch.equal(context.long(), values.long().abs().clamp(max=2))
    symbols = torch.randint(127, 130, (7, 61), generator=generator).to(torch.uint8)
    digits = (symbols.long() - 128) * torch.where(values < 0, -1, 1)
    expected = 3 * values.long() + digits
    refine(values, symbols)
    assert torch.equal(values.long(), expected)
    extreme = np.array([[32767, -32767, 10923, -10923]], np.int16)
    refine(extreme, np.array([[255, 255, 255, 128]], np.uint8))
    assert extreme.tolist() == [[32767, -32767, 32767, -32767]]


def test_mistakes_of_the_caller() -> None:
    numbers = torch.zeros(8, 5, dtype=torch.uint8)
    basis, out = torch.zeros(2, 8, 4), torch.zeros(2, 5, 4)
    shrink = torch.zeros(8)
    points = Points(numbers, shrink)
    with pytest.raises(ParameterError, match=r"basis: expected shape \[2, 8, 4\]"):
        reconstruct(points, basis[:, 1:], None, out)
    with pytest.raises(ParameterError, match="basis: expected contiguous"):
        reconstruct(points, torch.zeros(2, 4, 8).transpose(1, 2), None, out)
    with pytest.raises(ParameterError, match="numbers: expected int16, found int64"):
        reconstruct(Points(numbers.long(), shrink), basis, None, out)
    with pytest.raises(ParameterError, match="out: expected torch"):
        reconstruct(points, basis, None, out.double())
    with pytest.raises(ParameterError, match="out: expected a contiguous last axis"):
        reconstruct(points, torch.zeros(2, 8, 5), None, out.transpose(1, 2)[:, :5])
    with pytest.raises(ParameterError, match="tokens: expected 5 consecutive tokens of 5"):
        reconstruct(points, basis, None, out, tokens=slice(0, 4))
    tables = Rotation(torch.zeros(5, 4), torch.zeros(5, 2))
    with pytest.raises(ParameterError, match=r"sin: expected shape \[5, 4\]"):
        reconstruct(points, basis, None, out, rotation=tables)
    for width in (3, 6):
        tables = Rotation(torch.zeros(5, width), torch.zeros(5, width))
        with pytest.raises(ParameterError, match="cos: expected an even number"):
            reconstruct(points, basis, None, out, rotation=tables)
    with pytest.raises(ParameterError, match=r"shrink: expected shape \[8\]"):
        reconstruct(Points(numbers, shrink[1:]), basis, None, out)
    with pytest.raises(ParameterError, match="out: expected uint8"):
        contexts(numbers.short(), numbers.short())


@pytest.mark.parametrize(
    ("rows", "tokens"),
    [([8], [0]), ([0], [5]), ([1, 1], [2, 2]), ([1, 0], [2, 2]), ([0, 0], [2, 1])],
)
def test_patches_come_from_records(rows: list[int], tokens: list[int]) -> None:
    patches = Patches(
        np.array(rows, np.uint32), np.array(tokens, np.uint32), np.zeros(len(rows), np.float32)
    )
    points = Points(np.full((8, 5), 128, np.uint8), patches=patches)
    with pytest.raises(RecordError, match="patches: expected places within 8 rows and 5 tokens"):
        reconstruct(points, torch.zeros(1, 8, 8), None, torch.zeros(1, 5, 8))
