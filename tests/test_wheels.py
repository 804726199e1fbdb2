"""A wheel for another processor cannot be tried where it is built: its files are looked at."""

from __future__ import annotations

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


def test_a_module_under_the_name_of_another_processor_is_found(tmp_path: Path) -> None:
    tag = "cp311-cp311-manylinux_2_24_aarch64"
    found = unfit(wheel(tmp_path, tag, "aarch64", CPYTHON.format("x86_64")))
    assert found is not None
    assert "ends in .cpython-311-aarch64-linux-gnu.so" in found
    assert CPYTHON.format("x86_64") in found


def test_one_for_another_version_is_found(tmp_path: Path) -> None:
    tag = "cp312-abi3-manylinux_2_24_x86_64"
    assert "ends in .abi3.so" in str(
        unfit(wheel(tmp_path, tag, "x86_64", CPYTHON.format("x86_64")))
    )


def test_one_of_another_processors_code_is_found(tmp_path: Path) -> None:
    tag = "cp311-cp311-manylinux_2_24_aarch64"
    found = unfit(wheel(tmp_path, tag, "x86_64", CPYTHON.format("aarch64")))
    assert "expected code for aarch64, found ELF machine 62" in str(found)


def test_a_wheel_without_its_module_is_found(tmp_path: Path) -> None:
    tag = "cp311-cp311-manylinux_2_24_x86_64"
    assert "found none" in str(unfit(wheel(tmp_path, tag, "x86_64")))
