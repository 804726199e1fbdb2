"""Starts the kernels of ``cuda/triton``, which are written in Triton.

They are compiled ahead of time where the package ``kvrag_gpu`` has them for the card's
architecture (``python -m tools.aot --wheel`` makes it; starting them takes the extra ``gpu``).
Otherwise Triton, which PyTorch for CUDA brings, compiles them at first use, if a C compiler is
there. Otherwise, and with ``KVRAG_GPU_KERNELS=off``, PyTorch has to compute: `is_ready` says so.

A kernel more: its file in ``cuda/triton``, and an entry in `PROGRAMS`.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import xxhash

from kvrag.errors import ParameterError
from kvrag.native.gpu.compiling import Argument, launch_function, load_function, source_folder

VARIABLE = "KVRAG_GPU_KERNELS"
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100")
"""What is compiled ahead of time."""

TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
"""Triton's names of the types of elements."""

PACKAGE = "kvrag_gpu"
"""The package of kernels that are compiled."""

MOST_ERROR = {torch.bfloat16: 0.03, torch.float16: 0.01, torch.float32: 0.001}
"""How far kernels may be from PyTorch, as a share of what is computed: rounding alone is less."""

_log = logging.getLogger(__name__)
_trying = threading.Lock()
_trusted: dict[tuple[object, ...], bool] = {}
_lock = threading.Lock()
_loaded: dict[tuple[int, str], tuple[Any, int, int]] = {}

Constants = Mapping[str, int]


@dataclass(frozen=True)
class Tiling:
    """How a kernel is cut: constants besides those that callers give, and Triton's options."""

    constants: Constants
    warps: int
    stages: int = 1


@dataclass(frozen=True)
class Program:
    """A kernel of ``cuda/triton``.

    Attributes
    ----------
    file
        Its file there, without the ending.
    arguments
        Names and types of what differs between calls, in order: ``*T`` and ``*fp32`` are addresses,
        aligned to 16 bytes, of elements and of float32; ``i64/16`` is a multiple of 16.
    constants
        The values that each constant has ahead of time; others are compiled at first use.
    tiling
        Takes the constants and an architecture.
    """

    file: str
    arguments: Mapping[str, str]
    constants: Mapping[str, tuple[int, ...]]
    tiling: Callable[[Constants, str], Tiling]

    def variants(self) -> Iterator[Constants]:
        """Yield the constants of what is compiled ahead of time."""
        for values in product(*self.constants.values()):
            yield dict(zip(self.constants, values, strict=True))


def _attend_tiling(constants: Constants, arch: str) -> Tiling:
    # Found by compiling: larger tiles spill registers.
    head_dim, is_new = constants["D"], arch in ("sm_90", "sm_100")
    if head_dim > 128:
        return Tiling({"BM": 64 if constants["WHOLE"] else 32, "BN": 32}, warps=8, stages=2)
    if head_dim > 64 and not (is_new and constants["WHOLE"]):
        return Tiling({"BM": 64, "BN": 64}, warps=8, stages=2)
    return Tiling({"BM": 128, "BN": 64}, warps=8, stages=3 if is_new else 2)


def _mass_tiling(constants: Constants, _: str) -> Tiling:
    tile = {"BM": 64, "BN": 64 if constants["D"] <= 64 else 32}
    return Tiling(tile, warps=8 if constants["D"] > 128 else 4, stages=2)


def _place_tiling(constants: Constants, _: str) -> Tiling:
    width = 1 << (constants["D"] - 1).bit_length()
    return Tiling({"HALF": width // 2, "WIDTH": width, "BT": max(1, 4096 // width)}, warps=4)


def _synthesise_tiling(constants: Constants, _: str) -> Tiling:
    width = max(16, 1 << (constants["D"] - 1).bit_length())
    tile = 64 if constants["SUMS"] and width <= 128 else 32
    return Tiling({"WIDTH": width, "BT": tile, "BK": 32}, warps=8 if width > 64 else 4, stages=2)


def _fixed(warps: int, **constants: int) -> Callable[[Constants, str], Tiling]:
    return lambda _, __: Tiling(constants, warps)


def _program(
    file: str,
    arguments: str,
    tiling: Callable[[Constants, str], Tiling],
    **constants: tuple[int, ...],
) -> Program:
    """Return a program whose arguments are written as "type name name; type name"."""
    each = (part.split() for part in arguments.split(";"))
    named = {name: kind for kind, *names in each for name in names}
    return Program(file, named, constants, tiling)


_DIMS, _FLAG = (64, 128, 256), (0, 1)
_CODED = "*i16 payload; *i64 jobs; *i16 numbers; *i32 flags counts"
_SCORES = "i64 window; fp32 scale cap"

PROGRAMS: dict[str, Program] = {
    "place": _program(
        "place",
        "*i64 parts; *fp32 cos sin; *T keys values; i64 first_layer num_heads; i64/16 num_rotated;"
        "i64 capacity",
        _place_tiling,
        D=_DIMS,
    ),
    "rans": _program("codec", _CODED, _fixed(1), REFINES=_FLAG),
    "escapes": _program("codec", _CODED, _fixed(4, BLOCK=1024)),
    "synthesise": _program(
        "codec",
        "*i16 numbers; *i64 entries; *T like; i64 num_heads",
        _synthesise_tiling,
        **{"D": _DIMS, "SUMS": _FLAG, "EXACT": (0,)},
    ),
    "unpack": _program(
        "codec",
        "*u8 payload; *i64 entries; *i8 levels; *fp32 powers; *T like; i64 head_dim",
        _fixed(8, WIDTH=128, BT=64, BK=32),
    ),
    "kept": _program("codec", "*i16 payload; *i64 jobs", _fixed(4, BLOCK=1024)),
    "norm": _program(
        "rows",
        "*T rows weight out; *i64 state; i64/16 width; fp32 epsilon",
        _fixed(4, BLOCK=1024),
        **{"ADDS_ONE": _FLAG, "ADDS": _FLAG},
    ),
    "gated": _program(
        "rows", "*T gate up out; *i64 state; i64/16 width", _fixed(4, BLOCK=2048), GELU=_FLAG
    ),
    "rotate": _program(
        "rows",
        "*T query key value query_weight key_weight; *i64 positions state;"
        "i64 layer table num_asked num_given; fp32 epsilon",
        _fixed(4, BT=16),
        **{"D": _DIMS, "NORMS": _FLAG, "ADDS_ONE": _FLAG},
    ),
    "attend": _program(
        "rows",
        "*T query; *i64 positions state; *T out; *fp32 lse partial; *i32 counters;"
        f"i64 layer num_asked group most_rows; {_SCORES}",
        _attend_tiling,
        **{"D": _DIMS, "SOFTCAP": _FLAG, "WHOLE": _FLAG},
    ),
    "mass": _program(
        "rows",
        "*T query; *i64 positions state; *fp32 lse;"
        f"i64 layer num_asked num_given group most_rows; {_SCORES}",
        _mass_tiling,
        **{"D": _DIMS, "SOFTCAP": _FLAG},
    ),
}
"""The kernels by name."""


def is_ready(name: str, dtype: torch.dtype, device: torch.device, **constants: int) -> bool:
    """Return whether `start` can start a kernel on a device."""
    if dtype not in TYPES or os.environ.get(VARIABLE, "").lower() in ("off", "0"):
        return False
    if device.type == "cpu":
        return interprets()
    return device.type == "cuda" and (
        key_of(name, dtype, architecture(device), constants) in _compiled() or _can_compile()
    )


def is_trusted(
    what: str, dtype: torch.dtype, device: torch.device, *kind: object, error: Callable[[], float]
) -> bool:
    """Return whether kernels compute as PyTorch does on a device; tried once for each kind.

    What cannot be compiled, does not start or computes wrongly is not used, and one warning says
    so.

    Parameters
    ----------
    what
        What the kernels compute, for the warning.
    kind
        What decides which kernels run, and how they are compiled.
    error
        Starts the kernels, and returns how far they are from PyTorch.
    """
    key = what, dtype, device, *kind
    with _trying:
        if key not in _trusted:
            try:
                found = error()
                why = None if found <= MOST_ERROR[dtype] else f"off by {found:.2g}"
            except Exception as raised:  # a compiler's, the driver's
                why = str(raised).strip().partition("\n")[0] or type(raised).__name__
            if why is not None:
                _log.warning(
                    "kernels for %s are not used on %s (%s): PyTorch computes them, which is "
                    "slower; %s=off does the same without trying them",
                    what,
                    device,
                    why,
                    VARIABLE,
                )
            _trusted[key] = why is None
        return _trusted[key]


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return how far numbers are from those expected, as a share of their length."""
    error = float((found.double() - expected.double()).norm() / expected.double().norm())
    return error if math.isfinite(error) else math.inf


def start(
    name: str,
    grid: tuple[int, ...],
    *arguments: Argument | float,
    dtype: torch.dtype,
    device: torch.device,
    **constants: int,
) -> None:
    """Start a kernel on torch's current stream of `device`, and return without waiting.

    Parameters
    ----------
    name
        The kernel, of `PROGRAMS`.
    grid
        Programs in up to three directions. If one is 0, nothing happens.
    arguments
        In the kernel's order.
    dtype
        The type of elements.
    constants
        The kernel's, except those of its tiling.

    Raises
    ------
    ParameterError
        If `is_ready` is false.
    """
    if 0 in grid:
        return
    if not is_ready(name, dtype, device, **constants):
        raise ParameterError(
            f"kernel {name}: there is none for {device} and {dtype}: install Triton and a C "
            f"compiler, or the package {PACKAGE}; {VARIABLE}=off computes without"
        )
    tiling = PROGRAMS[name].tiling(constants, architecture(device))
    key = key_of(name, dtype, architecture(device), constants)
    if device.type == "cuda" and key in _compiled():
        function, threads, shared = _function(device, key)
        # Two addresses more, of scratch memory that these kernels do without.
        given = (*arguments, None, None)
        launch_function(function, device, grid, given, num_threads=threads, shared_bytes=shared)
        return
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel = getattr(sources(PROGRAMS[name].file), name)
        options = {"num_warps": tiling.warps, "num_stages": tiling.stages}
        kernel[grid](*arguments, **constants, **tiling.constants, **options)


def tiling_of(name: str, device: torch.device, **constants: int) -> Constants:
    """Return the constants of a kernel's tiling, which say how many programs it takes."""
    return PROGRAMS[name].tiling(constants, architecture(device)).constants


@cache
def architecture(device: torch.device) -> str:
    """Return a device's architecture; what the interpreter plays is sm_80."""
    if device.type != "cuda":
        return "sm_80"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


@cache
def sources(file: str) -> ModuleType:
    """Return a file of ``cuda/triton`` as a module. It needs Triton."""
    path = source_folder() / "triton" / f"{file}.py"
    spec = importlib.util.spec_from_file_location(f"kvrag_triton_{file}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def key_of(name: str, dtype: torch.dtype, arch: str, constants: Constants) -> str:
    """Return the name of a kernel compiled with some constants."""
    own = "".join(f"-{key}{value}" for key, value in sorted(constants.items()))
    return f"{name}-{TYPES[dtype]}{own}-{arch}"


def source_digest() -> str:
    """Return a digest of all that kernels compiled ahead of time are made of."""
    content = xxhash.xxh3_128()
    for path in sorted((source_folder() / "triton").glob("*.py")):
        content.update(path.read_bytes())
    return content.hexdigest()


def interprets() -> bool:
    """Return whether Triton's interpreter plays the card, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1" and _has_triton()


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@cache
def _can_compile() -> bool:
    compilers = (os.environ.get("CC"), "gcc", "clang")
    return _has_triton() and any(name and shutil.which(name) for name in compilers)


@cache
def _folder() -> Path | None:
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0])


@cache
def _compiled() -> Mapping[str, Mapping[str, Any]]:
    """Return what was compiled ahead of time, by key; nothing if it is of other sources."""
    folder = _folder()
    if folder is None:
        return {}
    try:
        known = json.loads((folder / "kernels.json").read_text())
        sources, found = known["sources"], known["kernels"]
    except (OSError, ValueError, KeyError) as error:
        _log.warning("%s in %s is not used: %s; install it again", PACKAGE, folder, error)
        return {}
    if sources != source_digest():
        _log.warning(
            "%s has the kernels of another version of kvrag, which are not used: install that of "
            "this one",
            PACKAGE,
        )
        return {}
    return found  # type: ignore[no-any-return]


def _function(device: torch.device, key: str) -> tuple[Any, int, int]:
    """Return a compiled kernel on a device, its threads and bytes of shared memory."""
    index = torch.cuda.current_device() if device.index is None else device.index
    with _lock:
        if (index, key) not in _loaded:
            folder, entry = _folder(), _compiled()[key]
            assert folder is not None
            cubin = (folder / f"{key}.cubin").read_bytes()
            shared = int(entry["shared"])
            function = load_function(cubin, entry["name"], index, shared)
            _loaded[index, key] = function, 32 * int(entry["warps"]), shared
        return _loaded[index, key]
