"""A wheel for another processor cannot be tried where it is built: its files are looked at."""

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
