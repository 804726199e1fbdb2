"""A wheel for another processor cannot be tried where it is built: its files are looked at."""

import struct
import zipfile
from pathlib import Path

import pytest

from tools.wheels import PROCESSORS, unfit

CPYTHON = "kvrag/_native.cpython-311-{}-linux-gnu.so"


def wheel(folder: Path, tag: str, processor: str, *modules: str) -> Path:
    """Write a wheel whose modules are all for one processor."""
    path = folder / f"kvrag-0.2.0-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("kvrag/__init__.py", "")
        for module in modules:
            code = b"\x7fELF".ljust(18, b"\0") + PROCESSORS[processor].to_bytes(2, "little")
            archive.writestr(module, code + bytes(40))
    return path


@pytest.mark.parametrize("processor", PROCESSORS)
def test_a_wheel_whose_modules_fit_its_tag(tmp_path: Path, processor: str) -> None:
    own = wheel(
        tmp_path, f"cp311-cp311-manylinux_2_24_{processor}", processor, CPYTHON.format(processor)
    )
    stable = wheel(
        tmp_path, f"cp312-abi3-manylinux_2_24_{processor}", processor, "kvrag/_native.abi3.so"
    )
    assert unfit(own) is None
    assert unfit(stable) is None


@pytest.mark.parametrize(
    ("tag", "code", "modules", "why"),
    [
        (
            "cp311-cp311-X_aarch64",
            "aarch64",
            ["x86_64"],
            "ends in .cpython-311-aarch64-linux-gnu.so",
        ),
        ("cp312-abi3-X_x86_64", "x86_64", ["x86_64"], "ends in .abi3.so"),
        ("cp311-cp311-X_aarch64", "x86_64", ["aarch64"], "expected code for aarch64, found ELF"),
        ("cp311-cp311-X_x86_64", "x86_64", [], "found none"),
    ],
)
def test_what_does_not_fit_is_found(
    tmp_path: Path, tag: str, code: str, modules: list[str], why: str
) -> None:
    named = tag.replace("X", "manylinux_2_24")
    assert why in str(unfit(wheel(tmp_path, named, code, *map(CPYTHON.format, modules))))


def mach(*commands: bytes, processor: int = 0x0100000C) -> bytes:
    header = struct.pack("<8I", 0xFEEDFACF, processor, 0, 6, len(commands), 0, 0, 0)
    return header + b"".join(commands)


def command(kind: int, path: bytes, at: int = 24) -> bytes:
    size = -(-(at + len(path) + 1) // 8) * 8
    return struct.pack("<3I", kind, size, at).ljust(at, b"\0") + path.ljust(size - at, b"\0")


SYSTEM = command(0xC, b"/usr/lib/libSystem.B.dylib")
ELEVEN, TWELVE = (struct.pack("<6I", 0x32, 24, 1, one << 16, 12 << 16, 0) for one in (11, 12))
SIGNED = struct.pack("<4I", 0x1D, 16, 0, 0)
NAMED = command(0xD, b"@rpath/_native")


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (mach(NAMED, SYSTEM, ELEVEN, SIGNED), None),
        (mach(NAMED, SYSTEM, ELEVEN, SIGNED, processor=7), "expected Mach-O for arm64"),
        (mach(NAMED, SYSTEM, ELEVEN), "expected a signature, found none"),
        (mach(NAMED, SYSTEM, TWELVE, SIGNED), r"expected macOS (11, 0), found (12, 0)"),
        (mach(SYSTEM, command(0xC, b"/opt/libc++.dylib"), ELEVEN, SIGNED), "as its only library"),
        (mach(command(0xD, b"/tmp/_native"), SYSTEM, ELEVEN, SIGNED), "no path of the building"),
        (mach(command(0x8000001C, b"/tmp", 12), SYSTEM, ELEVEN, SIGNED), "no path of the building"),
        (b"\x7fELF".ljust(64, b"\0"), "expected Mach-O for arm64"),
    ],
)
def test_what_macos_would_not_load_is_found(tmp_path: Path, code: bytes, why: str | None) -> None:
    path = tmp_path / "kvrag-0.2.0-cp312-abi3-macosx_11_0_arm64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("kvrag/_native.abi3.so", code)
    found = unfit(path)
    assert found is None if why is None else why in str(found)
