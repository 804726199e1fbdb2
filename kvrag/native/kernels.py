"""Chooses between the compiled kernels and the codecs' reference, for where none were compiled.

``KVRAG_ISA=reference`` in the environment takes the reference although there are compiled ones.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from kvrag.errors import ParameterError

VARIABLE = "KVRAG_ISA"
REFERENCE = "reference"

IS_COMPILED = os.environ.get(VARIABLE) != REFERENCE and find_spec("kvrag._native") is not None

if TYPE_CHECKING:
    from kvrag import _native as kernels
elif not IS_COMPILED:
    from kvrag.native import reference as kernels
else:
    from kvrag import _native as kernels

__all__ = ["IS_COMPILED", "REFERENCE", "VARIABLE", "kernels"]


# Chooses the instruction set of the kernels.


def instruction_set() -> str:
    """Return the name of the instruction set in use, as in ``KVRAG_ISA`` (`kvrag.native`)."""
    return kernels.instruction_set()


def instruction_sets() -> tuple[str, ...]:
    """Return the names of the instruction sets that this processor can run, slowest first."""
    return tuple(kernels.instruction_sets())


def use_instruction_set(name: str) -> None:
    """Use another instruction set from now on, in the whole process; for tests and benchmarks.

    Raises
    ------
    ParameterError
        If this processor, or this build, does not have it.
    """
    if not kernels.use_instruction_set(name):
        known = ", ".join(instruction_sets())
        raise ParameterError(f"instruction set: expected one of {known}, found {name!r}")


if name := os.environ.get(VARIABLE):
    try:
        use_instruction_set(name)
    except ParameterError as error:
        raise ParameterError(f"{VARIABLE}: {error}; unset it for the fastest one") from None


# -- arguments of kernels ------------------------------------------------------------------------

ArrayLike: TypeAlias = NDArray[Any] | torch.Tensor

MAX_THREADS = 256


def view(
    array: ArrayLike,
    name: str,
    dtype: type[np.generic],
    shape: tuple[int | None, ...],
    *,
    contiguous: bool = False,
    writable: bool = False,
) -> NDArray[Any]:
    """Return `array` as a numpy array over the same memory.

    Parameters
    ----------
    array
        A numpy array or a torch tensor on the CPU.
    name
        The array's name in errors.
    dtype
        The required element type.
    shape
        The required shape; None allows any length.
    contiguous
        Whether the whole array must be contiguous; otherwise only its last axis must.
    writable
        Whether the array must be writable.

    Raises
    ------
    ParameterError
        If the array does not meet these requirements.
    """
    if isinstance(array, torch.Tensor):
        if array.device.type != "cpu":
            raise ParameterError(f"{name}: expected memory on the CPU, found {array.device}")
        try:
            found = array.detach().numpy()
        except (TypeError, RuntimeError) as error:
            raise ParameterError(f"{name}: expected {dtype.__name__}, found {error}") from None
    elif isinstance(array, np.ndarray):
        found = array
    else:
        raise ParameterError(
            f"{name}: expected a numpy array or a torch tensor, found {type(array).__name__}"
        )
    if found.dtype != dtype:
        raise ParameterError(f"{name}: expected {np.dtype(dtype)}, found {found.dtype}")
    check_shape(found.shape, shape, name)
    if contiguous and not found.flags.c_contiguous:
        raise ParameterError(f"{name}: expected contiguous memory, found strides {found.strides}")
    if found.size and found.shape[-1] > 1 and found.strides[-1] != found.itemsize:
        raise ParameterError(
            f"{name}: expected a contiguous last axis, found a stride of {found.strides[-1]} bytes"
        )
    if any(stride % found.itemsize for stride in found.strides):
        raise ParameterError(f"{name}: expected strides of whole elements, found {found.strides}")
    if writable and not found.flags.writeable:
        raise ParameterError(f"{name}: expected writable memory, found read-only memory")
    return found


def check_shape(found: Sequence[int], wanted: tuple[int | None, ...], name: str) -> None:
    """Raise ParameterError unless `found` is the shape `wanted`; None allows any length."""
    if len(found) != len(wanted) or any(
        expected is not None and expected != length
        for expected, length in zip(wanted, found, strict=True)
    ):
        lengths = ", ".join("any" if length is None else str(length) for length in wanted)
        raise ParameterError(f"{name}: expected shape [{lengths}], found {list(found)}")


def byte_view(buffer: Any, name: str) -> NDArray[np.uint8]:
    """Return the bytes of `buffer` (bytes, bytearray, memoryview, uint8 array) without a copy.

    Raises
    ------
    ParameterError
        If it is not a contiguous buffer.
    """
    if isinstance(buffer, torch.Tensor):
        return view(buffer, name, np.uint8, (None,))
    try:
        raw = memoryview(buffer).cast("B")
    except (TypeError, ValueError) as error:
        raise ParameterError(f"{name}: expected a contiguous buffer, found {error}") from None
    return np.frombuffer(raw, np.uint8) if raw.nbytes else np.empty(0, np.uint8)


def check_contiguous(tensor: torch.Tensor, name: str, dtype: torch.dtype) -> None:
    """Raise ParameterError unless a tensor is contiguous, on the CPU and of one type."""
    # Some quantised models wrap others in tensors without memory.
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise ParameterError(f"{name}: expected a plain tensor, found {type(tensor).__name__}")
    if tensor.device.type == "cpu" and tensor.numel() and not tensor.data_ptr():
        raise ParameterError(f"{name}: expected a tensor with memory, found one without")
    if tensor.device.type != "cpu" or tensor.dtype != dtype or not tensor.is_contiguous():
        raise ParameterError(
            f"{name}: expected contiguous {dtype} on the CPU, found {tensor.dtype} with strides "
            f"{tensor.stride()} on {tensor.device}"
        )


def check_threads(threads: int) -> int:
    """Return `threads`, at most `MAX_THREADS`; raise ParameterError if it is below 1."""
    if threads < 1:
        raise ParameterError(f"threads: expected at least 1, found {threads}")
    return min(threads, MAX_THREADS)
