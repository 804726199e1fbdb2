"""Builds what a release uploads, from this checkout: ``make wheels``.

    python -m tools.wheels --out dist

Makes the source distributions, a wheel of kvrag for each processor of `PROCESSORS`, one without
compiled kernels for all other machines, and the wheel of kvrag-bench. zig compiles: it brings
the headers and stubs of every glibc, so the wheels run on older systems than the building one,
and on other processors. Python 3.11 makes wheels for itself; from 3.12 on, they have the stable
ABI and serve all later versions. auditwheel, abi3audit and twine check the result.

``--mac`` adds one for Apple's processors. No machine here runs it: only its headers are read.
"""

from __future__ import annotations

import argparse
import os
import shutil
import struct
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent
GLIBC = "2.28"
# Each with the number that stands for it in an ELF file.
PROCESSORS = {"x86_64": 62, "aarch64": 183}
MAC = "arm64"
# Of its Mach-O files: the kind of file, the processor, the oldest system, the only library.
_MAGIC, _CPU, _SYSTEM, _LIBRARY = 0xFEEDFACF, 0x0100000C, (11, 0), b"/usr/lib/libSystem.B.dylib"
_LOADS, _IDENTITY, _SEARCH = (0xC, 0x80000018, 0x8000001F), 0xD, 0x8000001C
_BUILD = 0x32
_NEEDED = {_BUILD: "the oldest system", 0x1D: "a signature"}


def main() -> None:
    """Parse the arguments and build."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where the files go")
    parser.add_argument(
        "--processor", action="append", choices=PROCESSORS, help="only these (default: all)"
    )
    parser.add_argument("--mac", action="store_true", help="one for macOS on arm64 too (untried)")
    given = parser.parse_args()
    out = given.out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="kvrag-wheels-") as scratch:
        _build(ROOT, out, "--sdist", {})
        (archive,) = out.glob("*.tar.gz")
        # Wheels come from what was packed, so nothing else that lies in the checkout is in them.
        shutil.unpack_archive(archive, scratch, filter="data")
        source = Path(scratch) / archive.name.removesuffix(".tar.gz")
        for processor in [*(given.processor or PROCESSORS), *([MAC] if given.mac else [])]:
            _compiled(source, processor, out, Path(scratch) / processor)
        _build(source, out, "--wheel", {"KVRAG_PURE": "1"})
    for kind in ("--wheel", "--sdist"):
        _build(ROOT / "bench", out, kind, {})
    check(out)
    for path in sorted(out.iterdir()):
        print(f"{path.stat().st_size / 1e6:6.2f} MB  {path.name}")


def check(out: Path) -> None:
    """Check the files of a folder; ends the program where one is wrong."""
    files = sorted(map(str, out.glob("kvrag*")))
    _run([sys.executable, "-m", "twine", "check", "--strict", *files])
    compiled = [name for name in files if "manylinux" in name or "macosx" in name]
    if not compiled:
        sys.exit(f"{out}: expected a wheel with compiled kernels, found none")
    for name in compiled:
        if found := unfit(Path(name)):
            sys.exit(f"{name}: {found}")
        if "manylinux" in name:
            _run([sys.executable, "-m", "auditwheel", "show", name])
        if "-abi3-" in name:
            _run([sys.executable, "-m", "abi3audit", "--strict", name])


def unfit(wheel: Path) -> str | None:
    """Say what keeps a wheel's Python from importing its compiled modules; None if nothing does.

    Python looks for a module by its suffix, which names version and processor as the wheel's tag
    does. What a wheel for another processor holds cannot be tried here.
    """
    _, abi, platform = wheel.stem.rsplit("-", 2)
    (processor,) = (name for name in (*PROCESSORS, MAC) if platform.endswith(f"_{name}"))
    suffix = (
        ".abi3.so" if abi == "abi3" else _suffix(f"cpython-{abi.removeprefix('cp')}", processor)
    )
    with zipfile.ZipFile(wheel) as archive:
        modules = [name for name in archive.namelist() if Path(name).suffix == ".so"]
        if not modules:
            return "expected a compiled module, found none"
        for name in modules:
            if not name.endswith(suffix):
                return f"expected a compiled module that ends in {suffix}, found {name}"
            if processor == MAC:
                if why := _unfit_mach(archive.read(name)):
                    return f"{name}: {why}"
                continue
            with archive.open(name) as module:
                machine = int.from_bytes(module.read(20)[18:], "little")
            if machine != PROCESSORS[processor]:
                return f"{name}: expected code for {processor}, found ELF machine {machine}"
    return None


def _unfit_mach(code: bytes) -> str | None:
    """Say what keeps macOS from loading a module; None if nothing that its header shows does."""
    magic, cpu, _, _, count, _ = struct.unpack_from("<6I", code)
    if (magic, cpu) != (_MAGIC, _CPU):
        return f"expected Mach-O for arm64, found {magic:#x} for processor {cpu:#x}"
    at, kinds = 32, set()
    for _ in range(count):
        kind, size, *rest = struct.unpack_from("<4I", code, at)
        kinds.add(kind)
        path = code[at + rest[0] : at + size].partition(b"\0")[0]
        if kind in _LOADS and path != _LIBRARY:
            return f"expected {_LIBRARY!r} as its only library, found {path!r}"
        if kind == _SEARCH or (kind == _IDENTITY and not path.startswith(b"@rpath/")):
            return f"expected no path of the building machine, found {path!r}"
        if kind == _BUILD and (found := (rest[1] >> 16, rest[1] >> 8 & 255)) != _SYSTEM:
            return f"expected macOS {_SYSTEM}, found {found}"
        at += size
    missing = [name for kind, name in _NEEDED.items() if kind not in kinds]
    return f"expected {' and '.join(missing)}, found none" if missing else None


def _suffix(version: str, processor: str) -> str:
    return f".{version}-{'darwin' if processor == MAC else f'{processor}-linux-gnu'}.so"


def _compiled(source: Path, processor: str, out: Path, scratch: Path) -> None:
    """Build the wheel with kernels compiled for a processor."""
    scratch.mkdir()
    target, platform = f"{processor}-linux-gnu.{GLIBC}", f"linux-{processor}"
    if processor == MAC:
        # Python's own functions are found when it loads the module.
        target = "aarch64-macos.11.0 -Wl,-undefined,dynamic_lookup -Wl,-install_name,@rpath/_native"
        platform = "macosx-11.0-arm64"
    tools = {
        name: _script(scratch / name, f"{name} {options}")
        for name, options in {
            "c++": f"-target {target} -isystem {_headers(scratch, processor)}",
            "ar": "",
            "ranlib": "",
        }.items()
    }
    _build(
        source,
        scratch / "built",
        "--wheel",
        {
            "CXX": str(tools["c++"]),
            # The wheel's tag and the module's suffix, in place of the building machine's. (The
            # stable ABI's suffix names no processor, and stays.)
            "_PYTHON_HOST_PLATFORM": platform,
            "SETUPTOOLS_EXT_SUFFIX": _suffix(str(sys.implementation.cache_tag), processor),
        },
        f"cmake.define.KVRAG_PROCESSOR={processor}",
        f"cmake.define.CMAKE_AR={tools['ar']}",
        f"cmake.define.CMAKE_RANLIB={tools['ranlib']}",
        # To CMake, a Mach-O file could not be changed while it is installed.
        "cmake.define.CMAKE_BUILD_WITH_INSTALL_RPATH=ON",
    )
    (wheel,) = (scratch / "built").glob("*.whl")
    if processor == MAC:
        shutil.move(wheel, out)
        return
    # "auto": by name it knows only the tags of the building machine's processor.
    repair = ["repair", "--plat", "auto", "--only-plat", "--wheel-dir", str(out), str(wheel)]
    _run([sys.executable, "-m", "auditwheel", *repair], quiet=True)


def _script(path: Path, command: str) -> Path:
    """Write a program that runs a command of zig: CMake wants each in one word."""
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ziglang {command} "$@"\n')
    path.chmod(0o755)
    return path


def _headers(scratch: Path, processor: str) -> Path:
    """Return a folder that stands in for the system's, of which zig reads nothing.

    Debian's ``pyconfig.h`` only names that of the processor, which says the same for all of 64
    bits with the stable ABI.
    """
    folder = scratch / "include"
    name = f"python{sysconfig.get_python_version()}"
    own = Path(f"/usr/include/{sysconfig.get_config_var('MULTIARCH')}/{name}/pyconfig.h")
    if own.is_file():
        to = folder / f"{processor}-linux-gnu" / name / "pyconfig.h"
        to.parent.mkdir(parents=True)
        shutil.copy(own, to)
    folder.mkdir(exist_ok=True)
    return folder


def _build(source: Path, out: Path, kind: str, extra: Mapping[str, str], *settings: str) -> None:
    options = [word for setting in settings for word in ("-C", setting)]
    command = [sys.executable, "-m", "build", "--no-isolation", kind, "--outdir", str(out)]
    _run([*command, *options, str(source)], extra=extra, quiet=True)


def _run(
    command: list[str], *, extra: Mapping[str, str] | None = None, quiet: bool = False
) -> None:
    """Run a program; ends this one with its output where it fails."""
    print("+", *command[2:], flush=True)
    beside = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": beside, **(extra or {})}
    done = subprocess.run(
        command, env=environment, capture_output=quiet, text=True, check=False, cwd=ROOT
    )
    if done.returncode:
        sys.exit(f"{(done.stdout or '') + (done.stderr or '')}\n{' '.join(command)}: failed")


if __name__ == "__main__":
    main()
