"""Starts compiled kernels on a graphics card, by the extra ``gpu``."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kvrag.errors import ParameterError

Argument = torch.Tensor | int | None

# A kernel may use more shared memory only if the call says so.
_DEFAULT_SHARED_BYTES = 48 << 10


def source_folder() -> Path:
    """Return the folder that holds ``triton/``."""
    installed = Path(__file__).parents[1] / "cuda"
    # In a checkout, the sources are in the repository's root.
    return installed if installed.is_dir() else Path(__file__).parents[3] / "cuda"


def free_bytes(device: torch.device) -> tuple[int, int]:
    """Return a card's free memory, PyTorch's own included, and all its memory, in bytes."""
    free, total = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + unused, total


def launch_function(
    function: Any,
    device: torch.device,
    grid: tuple[int, ...],
    arguments: Sequence[Argument | float],
    *,
    num_threads: int,
    shared_bytes: int,
) -> None:
    """Start a loaded kernel on torch's current stream of `device`, and return without waiting.

    Parameters
    ----------
    function
        What `load_function` returned.
    grid
        Blocks in up to three directions.
    arguments
        The arguments, in the kernel's order. Tensors and None become pointers, whole numbers become
        64-bit integers, others float32.
    num_threads
        Threads of a block.
    shared_bytes
        Dynamic shared memory of a block.
    """
    core = _cuda_core()
    with torch.cuda.device(device):
        # torch makes its context current only on first use, separately in each thread.
        core.Device(torch.cuda.current_device()).set_current()
        config = core.LaunchConfig(grid=grid, block=num_threads, shmem_size=shared_bytes)
        passed = map(_passed, arguments)
        # PyTorch before 2.10 does not say itself what its streams are.
        stream = core.Stream.from_handle(torch.cuda.current_stream().cuda_stream)
        core.launch(stream, config, function, *passed)


def load_function(cubin: bytes, name: str, index: int, shared_bytes: int) -> Any:
    """Return a kernel of a cubin on a device, allowed to use so much dynamic shared memory."""
    core = _cuda_core()
    with torch.cuda.device(index):
        core.Device(index).set_current()
        function = core.ObjectCode.from_cubin(cubin).get_kernel(name)
        if shared_bytes > _DEFAULT_SHARED_BYTES:
            from cuda.bindings import driver

            most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            (error,) = driver.cuKernelSetAttribute(
                most, shared_bytes, function.handle, driver.CUdevice(index)
            )
            if int(error):
                raise ParameterError(
                    f"kernel {name}: expected a card with {shared_bytes} bytes of shared memory "
                    f"for a block, found {error!r}"
                )
    return function


def _passed(argument: Argument | float) -> Any:
    if isinstance(argument, torch.Tensor):
        return argument.data_ptr()
    return ctypes.c_float(argument) if isinstance(argument, float) else argument or 0


def _cuda_core() -> Any:
    try:
        import cuda.core as core
    except ImportError as error:
        raise ParameterError(
            f"kernels for the GPU: expected cuda-core, found {error}; pip install 'kvrag[gpu]'"
        ) from None
    return core
