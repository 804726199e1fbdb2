"""Checks of the tensors that callers pass in."""

from __future__ import annotations

import torch

from kvrag.errors import ParameterError
from kvrag.native.arrays import check_shape

_DEVICE_TYPE = "cuda"


def check(
    tensor: torch.Tensor,
    name: str,
    dtype: torch.dtype,
    shape: tuple[int | None, ...],
    device: torch.device,
    *,
    contiguous: bool = True,
) -> torch.Tensor:
    """Return `tensor`, or raise ParameterError unless it is what a kernel may be given.

    Parameters
    ----------
    tensor
        On `device`.
    name
        What to call it in errors.
    dtype, shape
        Those it must have; None in `shape` where any length will do.
    device
        Where it must be.
    contiguous
        Whether all of it must be contiguous; otherwise only its last axis.
    """
    if tensor.device != device or device.type != _DEVICE_TYPE:
        raise ParameterError(
            f"{name}: expected a tensor on one GPU with the others, found one on {tensor.device}"
        )
    if tensor.dtype != dtype:
        raise ParameterError(f"{name}: expected {dtype}, found {tensor.dtype}")
    check_shape(tensor.shape, shape, name)
    if contiguous and not tensor.is_contiguous():
        raise ParameterError(f"{name}: expected contiguous memory, found strides {tensor.stride()}")
    if tensor.numel() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ParameterError(
            f"{name}: expected a contiguous last axis, found a stride of {tensor.stride(-1)}"
        )
    return tensor


def check_optional(
    tensor: torch.Tensor | None,
    name: str,
    dtype: torch.dtype,
    shape: tuple[int | None, ...],
    device: torch.device,
    *,
    contiguous: bool = True,
) -> torch.Tensor | None:
    """Return what `check` does, or None where there is nothing to check."""
    if tensor is None:
        return None
    return check(tensor, name, dtype, shape, device, contiguous=contiguous)
