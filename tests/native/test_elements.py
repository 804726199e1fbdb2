"""Norms, gates and rotations against torch, for every instruction set."""

import pytest
import torch
from torch.nn import functional

from kvrag.errors import ParameterError
from kvrag.native.reconstruction import gated, rms_norm, rotate
from tests.support.properties import in_turn

DTYPES = [torch.float32, torch.bfloat16]


def near(found: torch.Tensor, expected: torch.Tensor, atol: float = 1e-6) -> bool:
    """Return whether numbers differ by a rounding of their type or, in float32, by a few."""
    assert found.dtype == expected.dtype
    eps = torch.finfo(found.dtype).eps * (1 if found.dtype == torch.bfloat16 else 16)
    return torch.allclose(found.double(), expected.double(), rtol=eps, atol=atol)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "adds_one"), in_turn([(1, 1), (3, 7), (2, 5, 64), (33, 577), (200, 1024)])
)
def test_norm(isa: str, shape: tuple[int, ...], adds_one: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    rows = (torch.randn(shape, generator=generator) * 3).to(dtype)
    weight = torch.randn(shape[-1], generator=generator).to(dtype)
    wide = rows.float()
    made = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
    expected = made * (1 + weight.float()) if adds_one else made.to(dtype) * weight
    assert near(rms_norm(rows, weight, 1e-5, adds_one=adds_one), expected.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "is_gelu"), in_turn([(1,), (17,), (5, 33), (70, 2048)]))
def test_gate(isa: str, shape: tuple[int, ...], is_gelu: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    gate, up = (torch.randn(2, *shape, generator=generator) * 5).to(dtype)
    opened = functional.gelu(gate, approximate="tanh") if is_gelu else functional.silu(gate)
    # Far below 0, GELU is a difference of two numbers close to 1, times some tens.
    assert near(gated(gate, up, is_gelu=is_gelu), opened * up, atol=3e-5 if is_gelu else 1e-6)


def test_weights_need_not_be_contiguous() -> None:
    rows, weight = torch.randn(3, 1000), torch.randn(2000)[::2]
    assert torch.equal(rms_norm(rows, weight, 1e-6), rms_norm(rows, weight.clone(), 1e-6))


def test_gates_of_great_numbers(isa: str) -> None:
    numbers = torch.tensor([-3e38, -1e30, -300.0, -89.0, 0.0, 89.0, 300.0, 1e30])
    expected = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 89.0, 300.0, 1e30])
    for is_gelu in (False, True):
        found = gated(numbers, torch.ones(8), is_gelu=is_gelu)
        assert torch.allclose(found, expected, atol=1e-6)


def test_nan_stays_nan(isa: str) -> None:
    rows = torch.ones(2, 20)
    rows[1, 3] = float("nan")
    for dtype in DTYPES:
        part = rows.to(dtype)
        ones = torch.ones(20).to(dtype)
        assert rms_norm(part, ones, 1e-6).isnan().sum(1).tolist() == [0, 20]
        assert gated(part, ones.expand(2, 20)).isnan().sum(1).tolist() == [0, 1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "num_rotated"), [(64, 64), (80, 32), (24, 20), (6, 2)])
def test_rotation(isa: str, head_dim: int, num_rotated: int, dtype: torch.dtype) -> None:
    """Neither heads nor rows are next to each other, as in a fused buffer."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(3, 50, head_dim, generator=generator).to(dtype)[:, 3:]
    angles = torch.rand(47, num_rotated // 2, generator=generator).mul(6).repeat(1, 2)
    buffer = torch.full((3, 60, head_dim), 7.0).to(dtype)
    assert rotate(rows, angles.cos(), angles.sin(), buffer[:, 5:52])
    half = num_rotated // 2
    cos, sin = angles.cos()[:, :half], angles.sin()[:, :half]
    first, second, rest = rows.float().split([half, half, head_dim - num_rotated], -1)
    expected = torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)
    assert near(buffer[:, 5:52], expected.to(dtype))
    assert (buffer[:, :5] == 7).all()
    assert (buffer[:, 52:] == 7).all()


def test_what_is_not_rotated() -> None:
    rows, out = torch.ones(2, 3, 8), torch.zeros(2, 3, 8)
    cos = sin = torch.ones(3, 8)
    assert not rotate(rows.half(), cos, sin, out.half())
    assert not rotate(rows, cos, sin, out.bfloat16())
    assert not rotate(rows.mT.contiguous().mT, cos, sin, out)
    assert not rotate(rows[0], cos, sin, out[0])
    assert not rotate(rows, cos.double(), sin.double(), out)
    assert not rotate(rows.requires_grad_(), cos, sin, out)
    assert not out.any()


def test_arguments_that_do_not_fit() -> None:
    rows, angles = torch.ones(2, 3, 8), torch.ones(3, 8)
    for cos, out in ((angles[:2], rows), (angles, rows[:1]), (torch.ones(3, 10), rows)):
        with pytest.raises(ParameterError):
            rotate(rows, cos, cos, out)
    with pytest.raises(ParameterError, match="even"):
        rotate(rows, angles[:, :3].contiguous(), angles[:, :3].contiguous(), rows.clone())
    with pytest.raises(ParameterError, match="weight: expected shape"):
        rms_norm(rows, torch.ones(7), 1e-6)
    with pytest.raises(ParameterError, match="weight: expected"):
        rms_norm(rows, torch.ones(8).bfloat16(), 1e-6)
    with pytest.raises(ParameterError, match="rows: expected"):
        rms_norm(rows.half(), torch.ones(8).half(), 1e-6)
    with pytest.raises(ParameterError, match="up: expected shape"):
        gated(rows, rows[:1])
    with pytest.raises(ParameterError, match="up: expected"):
        gated(rows, rows.bfloat16())


@pytest.mark.parametrize("count", [0, 1])
def test_nothing_and_little(isa: str, count: int) -> None:
    rows = torch.ones(count, 4)
    assert torch.equal(rms_norm(rows, torch.ones(4), 0.0), rows)
    assert gated(rows, rows).shape == rows.shape
    assert rotate(rows[:, None], torch.ones(1, 4), torch.zeros(1, 4), torch.empty(count, 1, 4))
