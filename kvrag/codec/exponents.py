"""Splits floating-point numbers into exponents and the rest, for codec ``lossless``."""

from __future__ import annotations

import torch

# dtype: signed integer of its width, bits of the exponent, bits of the mantissa
_LAYOUTS = {
    torch.float32: (torch.int32, 8, 23),
    torch.bfloat16: (torch.int16, 8, 7),
    torch.float16: (torch.int16, 5, 10),
}


def split(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return exponent fields int32, and sign and mantissa int32 (sign above the mantissa)."""
    integer, exponent_bits, mantissa_bits = _LAYOUTS[numbers.dtype]
    bits = numbers.view(integer).int()
    exponents = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1)
    sign = (bits >> (exponent_bits + mantissa_bits)) & 1
    return exponents, sign << mantissa_bits | bits & ((1 << mantissa_bits) - 1)


def join(exponents: torch.Tensor, rest: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers that `split` was given."""
    integer, exponent_bits, mantissa_bits = _LAYOUTS[dtype]
    sign = rest >> mantissa_bits
    mantissa = rest & ((1 << mantissa_bits) - 1)
    bits = sign << (exponent_bits + mantissa_bits) | exponents << mantissa_bits | mantissa
    return bits.to(integer).view(dtype)


def greatest_exponent(dtype: torch.dtype) -> int:
    """Return the exponent field that only NaN and infinity have."""
    return (1 << _LAYOUTS[dtype][1]) - 1


def rest_bits(dtype: torch.dtype) -> int:
    """Return the bits of sign and mantissa."""
    return 1 + _LAYOUTS[dtype][2]
