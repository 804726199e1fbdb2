"""Checks of callers' tensors."""

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
    """Return `tensor`; raise ParameterError unless a kernel can take it.

    Parameters
    ----------
    tensor
        The tensor.
    name
        The tensor's name in errors.
    dtype, shape
        The required type and shape; None in `shape` allows any length.
    device
        The required device.
    contiguous
        Whether the whole tensor must be contiguous; otherwise only its last axis must.
    """
    if tensor.device != device or device.type != _DEVICE_TYPE:
        raise ParameterError(
            f"{name}: expected a tensor on the same GPU as the others, found one on {tensor.device}"
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
    """Return the result of `check`, or None for no tensor."""
    if tensor is None:
        return None
    return check(tensor, name, dtype, shape, device, contiguous=contiguous)
