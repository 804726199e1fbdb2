"""Compiles the sources in ``cuda/`` to kernels on a device, with NVRTC and a cache."""

from __future__ import annotations

import contextlib
import ctypes
import os
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash

from kvrag import arguments
from kvrag.errors import ParameterError
from kvrag.regularfile import open_regular

_KERNELS = {
    "rans": ("rans_decode", "rans_encode", "rans_pack"),
    "reconstruct": ("dequantise", "patch", "place", "channels", "magnitude_contexts", "refine"),
}
_FILE_OF = {kernel: file for file, kernels in _KERNELS.items() for kernel in kernels}
_THREADS = 256
_CHECKSUM_BYTES = 16

_lock = threading.Lock()
_loaded: dict[tuple[int, str], Any] = {}

Argument = torch.Tensor | int | None

# A kernel may use more shared memory only if the call says so.
_DEFAULT_SHARED_BYTES = 48 << 10


def source_folder() -> Path:
    """Return the folder that holds ``include/`` and ``kernels/``."""
    installed = Path(__file__).parents[1] / "cuda"
    # In a checkout, the sources are in the repository's root.
    return installed if installed.is_dir() else Path(__file__).parents[3] / "cuda"


def compile_kernels(file: str, arch: str) -> bytes:
    """Return the cubin of ``kernels/<file>.cu``. It needs NVRTC, but no GPU.

    Parameters
    ----------
    file
        rans or reconstruct.
    arch
        The architecture to compile for, such as sm_90.

    Raises
    ------
    ParameterError
        If the extra ``gpu`` is not installed.
    """
    core = _cuda_core()
    folder = source_folder()
    options = core.ProgramOptions(
        name=f"{file}.cu", arch=arch, std="c++17", include_path=[str(folder / "include")]
    )
    source = (folder / "kernels" / f"{file}.cu").read_text()
    return bytes(core.Program(source, "c++", options).compile("cubin").code)


def launch(
    kernel: str,
    device: torch.device,
    grid: tuple[int, ...],
    *arguments: Argument,
    num_threads: int = _THREADS,
    shared_bytes: int = 0,
) -> None:
    """Start a kernel on torch's current stream of `device`, and return without waiting.

    Parameters
    ----------
    kernel
        The kernel's name.
    grid
        Blocks in x and y. If one is 0, nothing happens.
    arguments
        The arguments, in the kernel's order. Tensors and None become pointers, numbers become
        64-bit integers.
    num_threads
        Threads of a block.
    shared_bytes
        Dynamic shared memory of a block.
    """
    if 0 in grid:
        return
    with torch.cuda.device(device):
        # torch makes its context current only on first use, separately in each thread.
        _cuda_core().Device(torch.cuda.current_device()).set_current()
        function = _function(kernel)
    launch_function(
        function, device, grid, arguments, num_threads=num_threads, shared_bytes=shared_bytes
    )


def launch_function(
    function: Any,
    device: torch.device,
    grid: tuple[int, ...],
    arguments: Sequence[Argument | float],
    *,
    num_threads: int,
    shared_bytes: int,
) -> None:
    """Start a loaded kernel as `launch` does; floating-point numbers become float32."""
    core = _cuda_core()
    with torch.cuda.device(device):
        core.Device(torch.cuda.current_device()).set_current()
        config = core.LaunchConfig(grid=grid, block=num_threads, shmem_size=shared_bytes)
        passed = map(_passed, arguments)
        core.launch(torch.cuda.current_stream(), config, function, *passed)


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


def blocks_for(num_items: int, num_threads: int = _THREADS) -> tuple[int, int]:
    """Return a grid for kernels that stride over `num_items`."""
    return min(-(-num_items // num_threads), 1 << 16), 1


def _function(kernel: str) -> Any:
    """Return a kernel for the current device."""
    index = torch.cuda.current_device()
    with _lock:
        if (index, kernel) not in _loaded:
            core = _cuda_core()
            file = _FILE_OF[kernel]
            major, minor = torch.cuda.get_device_capability(index)
            module = core.ObjectCode.from_cubin(_cached_cubin(file, f"sm_{major}{minor}"))
            for name in _KERNELS[file]:
                _loaded[index, name] = module.get_kernel(name)
        return _loaded[index, kernel]


def _cached_cubin(file: str, arch: str) -> bytes:
    """Return the result of `compile_kernels`, which an earlier process may have cached."""
    path = _cache_folder() / f"{file}-{arch}-{_key(file)}.cubin"
    with contextlib.suppress(OSError):
        with open_regular(path) as cached:
            kept = cached.read()
        if xxhash.xxh3_128_digest(kept[_CHECKSUM_BYTES:]) == kept[:_CHECKSUM_BYTES]:
            return kept[_CHECKSUM_BYTES:]
    cubin = compile_kernels(file, arch)
    # If the folder cannot be written, each process compiles again.
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as written:
            written.write(xxhash.xxh3_128_digest(cubin) + cubin)
        Path(name).replace(path)
    return cubin


def _key(file: str) -> str:
    """Return a hash of everything that the compiler reads, and of the compiler's version."""
    folder = source_folder()
    content = xxhash.xxh3_128(_compiler_version().encode())
    headers = sorted((folder / "include" / "kvrag").glob("*.h"))
    for path in [*headers, folder / "kernels" / f"{file}.cu"]:
        content.update(path.read_bytes())
    return content.hexdigest()


def _compiler_version() -> str:
    from cuda.bindings import nvrtc

    return str(nvrtc.nvrtcVersion())


def _cache_folder() -> Path:
    named = os.environ.get("KVRAG_CACHE")
    if named:
        return arguments.path(named, "KVRAG_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return arguments.path(base, "XDG_CACHE_HOME") / "kvrag"


def _cuda_core() -> Any:
    try:
        import cuda.core as core
    except ImportError as error:
        raise ParameterError(
            f"kernels for the GPU: expected cuda-core, found {error}; pip install 'kvrag[gpu]'"
        ) from None
    return core
