"""Compiles the kernels of ``cuda/triton`` ahead of time: ``python -m tools.aot``.

    python -m tools.aot --out build/gpu-kernels           # the package kvrag_gpu, and its wheel
    python -m tools.aot --arch sm_90 --head-dim 128 --json   # some of them, and what they take

It needs Triton (the extra ``dev``), no card. Each kernel is told with its registers, bytes of
spilled registers and matrix instructions; the program ends with 1 if a kernel spills, or takes
more shared memory than its cards have.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

# Cubins without line numbers are a third as large.
os.environ.setdefault("TRITON_DISABLE_LINE_INFO", "1")
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch

import kvrag
from kvrag.native.gpu import tiled

ROOT = Path(__file__).parent.parent
# KiB of shared memory that a block may have.
MOST_SHARED = {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227, "sm_100": 227}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_MATRIX = re.compile(r"wgmma\.mma_async|mma\.sync|tcgen05\.mma")
_PROJECT = """\
[build-system]
requires = ["hatchling>=1.27,<2"]
build-backend = "hatchling.build"

[project]
name = "kvrag-gpu"
version = "{version}"
description = "kvrag's kernels for NVIDIA GPUs, compiled: `pip install 'kvrag[gpu]'`."
license = "Apache-2.0"
requires-python = ">=3.11"

[tool.hatch.build.targets.wheel]
packages = ["kvrag_gpu"]
artifacts = ["*.cubin"]
"""


def main() -> None:
    """Parse the arguments and compile."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-kernels")
    parser.add_argument("--arch", action="append", choices=tiled.ARCHITECTURES)
    parser.add_argument("--dtype", action="append", choices=DTYPES)
    parser.add_argument("--head-dim", action="append", type=int, help="only these")
    parser.add_argument("--kernel", action="append", choices=tiled.PROGRAMS)
    parser.add_argument("--wheel", action="store_true", help="build the wheel, too")
    parser.add_argument("--json", action="store_true", help="print what they take as JSON")
    given = parser.parse_args()
    package = given.out / tiled.PACKAGE
    package.mkdir(parents=True, exist_ok=True)
    for old in package.glob("*.cubin"):
        old.unlink()
    made: dict[str, dict[str, Any]] = {}
    for name, dtype, arch, constants in wanted(given):
        key = tiled.key_of(name, DTYPES[dtype], arch, constants)
        cubin, told = compiled(name, dtype, arch, constants)
        (package / f"{key}.cubin").write_bytes(cubin)
        made[key] = told
        if not given.json:
            print(
                f"{key}: {told['registers']} registers, {told['spills']} bytes spilled, "
                f"{told['matrix']} matrix instructions, {told['shared'] / 1024:.0f} KiB shared"
            )
    described = {"version": kvrag.__version__, "sources": tiled.source_digest(), "kernels": made}
    (package / "kernels.json").write_text(json.dumps(described, indent=1))
    (package / "__init__.py").write_text('"""Kernels of kvrag, compiled by its tools/aot.py."""\n')
    (given.out / "pyproject.toml").write_text(_PROJECT.format(version=kvrag.__version__))
    if given.json:
        print(json.dumps(made))
    if given.wheel:
        command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(given.out / "dist")]
        subprocess.run([*command, str(given.out)], check=True)
    spilled = [key for key, told in made.items() if told["spills"]]
    if spilled:
        sys.exit(f"spilled registers: {', '.join(spilled)}")
    large = [
        key
        for key, told in made.items()
        if told["shared"] > MOST_SHARED[key.rpartition("-")[2]] << 10
    ]
    if large:
        sys.exit(f"more shared memory than a block may have: {', '.join(large)}")


def wanted(given: argparse.Namespace) -> Iterator[tuple[str, str, str, Mapping[str, int]]]:
    """Yield what to compile: kernel, type, architecture and constants."""
    for arch in given.arch or tiled.ARCHITECTURES:
        for dtype in given.dtype or DTYPES:
            for name in given.kernel or tiled.PROGRAMS:
                for constants in tiled.PROGRAMS[name].variants():
                    head_dim = constants.get("D")
                    if given.head_dim and head_dim and head_dim not in given.head_dim:
                        continue
                    yield name, dtype, arch, constants


def compiled(
    name: str, dtype: str, arch: str, constants: Mapping[str, int]
) -> tuple[bytes, dict[str, Any]]:
    """Return a kernel's cubin, and what a launch of it has to know and it takes."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    program = tiled.PROGRAMS[name]
    tiling = program.tiling(constants, arch)
    signature, divisible = {}, {}
    for index, (argument, kind) in enumerate(program.arguments.items()):
        if kind.startswith("*") or kind.endswith("/16"):
            divisible[(index,)] = [["tt.divisibility", 16]]
        kind = kind.removesuffix("/16")
        signature[argument] = f"*{dtype}" if kind == "*T" else kind
    fixed = {**constants, **tiling.constants}
    signature |= dict.fromkeys(fixed, "constexpr")
    source = ASTSource(
        fn=getattr(tiled.sources(program.file), name),
        signature=signature,
        constexprs=fixed,
        attrs=divisible,
    )
    made = triton.compile(
        source,
        target=GPUTarget("cuda", int(arch.removeprefix("sm_")), 32),
        options={"num_warps": tiling.warps, "num_stages": tiling.stages},
    )
    ptx = made.asm["ptx"]
    entry = ptx[ptx.index(".entry") :]
    num_parameters = entry[: entry.index("{")].count(".param ")
    if num_parameters != len(program.arguments) + 2:
        raise SystemExit(
            f"{name}: expected {len(program.arguments)} arguments and two of scratch memory, found "
            f"{num_parameters}: another Triton than this was written for; see launch in tiled.py"
        )
    if made.metadata.global_scratch_size or made.metadata.profile_scratch_size:
        raise SystemExit(f"{name}: expected a kernel without scratch memory")
    registers, spills = _usage(made.asm["cubin"], ptx, arch)
    return made.asm["cubin"], {
        "name": made.metadata.name,
        "warps": made.metadata.num_warps,
        "shared": made.metadata.shared,
        "registers": registers,
        "spills": spills,
        "matrix": len(_MATRIX.findall(ptx)),
    }


def _usage(cubin: bytes, ptx: str, arch: str) -> tuple[int, int]:
    """Return registers of a thread and bytes spilled, by Triton's own assembler."""
    import triton.backends.nvidia as nvidia

    assembler = sorted((Path(nvidia.__file__).parent / "bin").glob("ptxas*"))[-1]
    target = re.search(r"^\.target (\S+)", ptx, re.MULTILINE)
    assert target is not None
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        command = [str(assembler), "-v", f"--gpu-name={target[1].rstrip(',')}", str(source)]
        command += ["-o", str(Path(folder, "kernel.cubin"))]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", told)
    assert registers is not None, f"{arch}: {told} ({len(cubin)} bytes)"
    return int(registers[1]), sum(map(int, re.findall(r"(\d+) bytes spill", told)))


if __name__ == "__main__":
    main()
