"""The GPU's kernels: compiled wherever a compiler is, run on a GPU wherever one is.

Everywhere else they run as well, their threads played by the host's (`tests/native/cpp`), behind
the same Python door.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvrag.native.gpu.compiling as compiling
import kvrag.native.gpu.entropy as gpu_entropy
import kvrag.native.gpu.reconstruction as gpu_reconstruction
import kvrag.native.gpu.tensors as gpu_tensors
from kvrag import native
from kvrag.errors import ParameterError, RecordError
from kvrag.native import Points, RansModel, Rotation, gpu
from tests.native.cases import Case, make_case
from tests.native.reference_rans import join, split
from tests.native.reference_reconstruction import placed, transformed
from tests.native.test_reconstruction import (
    assert_close,
    make_numbers,
    make_patches,
    make_rotation,
)

HERE = Path(__file__).parent
GOLDEN = sorted((HERE / "golden").glob("rans-*.npz"))
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(scope="session")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Return the kernels compiled for the host."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    library = tmp_path_factory.mktemp("emulator") / "kernels.so"
    folder = compiling.source_folder() / "include"
    source = HERE / "cpp" / "emulated_library.cpp"
    command = [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", f"-I{folder}"]
    subprocess.run([*command, str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


@pytest.fixture(params=["emulated", "cuda"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield the device to put tensors on."""
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("no GPU")
        yield "cuda"
        return
    library = request.getfixturevalue("emulator")

    def launch(
        kernel: str,
        device: torch.device,
        grid: tuple[int, int],
        *arguments: Any,
        num_threads: int = 64,
        shared_bytes: int = 0,
    ) -> None:
        if 0 in grid:
            return
        numbers = [a.data_ptr() if isinstance(a, torch.Tensor) else a or 0 for a in arguments]
        passed = (ctypes.c_uint64 * len(numbers))(*numbers)
        assert shared_bytes <= 4 * 32 * 257
        done = library.launch(
            kernel.encode(),
            min(grid[0], 64) if kernel != "channels" else grid[0],
            grid[1],
            num_threads,
            passed,
            ctypes.c_uint64(len(numbers)),
        )
        assert done == 0, (kernel, done)

    for module in (gpu_entropy, gpu_reconstruction):
        monkeypatch.setattr(module, "launch", launch)
    monkeypatch.setattr(gpu_tensors, "_DEVICE_TYPE", "cpu")
    yield "cpu"


def on(device: str, array: Any) -> Any:
    return None if array is None else torch.as_tensor(array).to(device)


def decoded(case: Case, payload: bytes, device: str) -> np.ndarray:
    tables = gpu.DeviceTables(RansModel(case.frequencies), device)
    out = torch.zeros(case.symbols.shape, dtype=torch.uint8, device=device)
    classes, context = on(device, case.classes), on(device, case.context)
    gpu.decode_rows(tables, payload, classes, out, context=context).check()
    return out.cpu().numpy()


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_golden_payloads(path: Path, device: str) -> None:
    golden = np.load(path)
    case = Case(golden["frequencies"], golden["symbols"], golden["classes"], golden.get("context"))
    expected = golden["payload"].tobytes()
    assert (decoded(case, expected, device) == case.symbols).all()
    tables = gpu.DeviceTables(RansModel(case.frequencies), device)
    payload = gpu.encode_rows(
        tables,
        on(device, case.symbols),
        on(device, case.classes),
        int(golden["num_streams"]),
        context=on(device, case.context),
    )
    assert payload.cpu().numpy().tobytes() == expected


def test_symbols_that_cannot_be_coded(device: str) -> None:
    frequencies = np.zeros((1, 256), np.uint16)
    frequencies[:, 3] = 4096
    symbols = torch.full((6, 40), 3, dtype=torch.uint8, device=device)
    symbols[4, 39] = 4
    tables = gpu.DeviceTables(RansModel(frequencies), device)
    classes = torch.zeros(6, dtype=torch.uint16, device=device)
    with pytest.raises(ParameterError, match="rows 4 to 6: expected symbols of nonzero"):
        gpu.encode_rows(tables, symbols, classes, 3)


def test_damage_is_what_the_host_finds(device: str) -> None:
    case = make_case(11, 12, 75)
    model = RansModel(case.frequencies)
    payload = native.encode_rows(model, case.symbols, case.classes, 3)
    first, second, third = split(payload)
    flipped = bytearray(payload)
    flipped[200] ^= 4
    low = bytearray(payload)
    low[18:20] = b"\0\0"
    damaged = [
        b"",
        payload[:4],
        payload[:-2],
        payload + b"\0",
        join([first] * 13),
        join([first, second + b"\0", third]),
        join([first, second[:100], third]),
        join([first + b"\0\0", second, third]),
        join([first, second[:-2], third]),
        bytes(flipped),
        bytes(low),
    ]
    for bad in damaged:
        with pytest.raises(RecordError) as expected:
            native.decode_rows(model, bad, case.classes, np.zeros_like(case.symbols))
        with pytest.raises(RecordError) as found:
            decoded(case, bad, device)
        assert str(found.value) == str(expected.value)


def test_classes_beyond_the_tables_stay_inside_them(device: str) -> None:
    case = make_case(11, 12, 75)
    payload = native.encode_rows(RansModel(case.frequencies), case.symbols, case.classes)
    with pytest.raises(RecordError):
        decoded(Case(case.frequencies, case.symbols, case.classes + np.uint16(9)), payload, device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("number_type", [torch.uint8, torch.int16])
def test_transform(dtype: torch.dtype, number_type: torch.dtype, device: str) -> None:
    generator = torch.Generator().manual_seed(1)
    numbers = make_numbers(generator, (30, 70), number_type, 0.5)
    shrink, mean = torch.rand(30, generator=generator), torch.randn(2, 16, generator=generator)
    basis = torch.randn(2, 30, 16, generator=generator) / 100
    tokens = slice(5, 44)
    rotation = make_rotation(generator, 39, 12)
    patches = make_patches(generator, (30, 70), 50)
    points = Points(numbers, shrink, patches)
    expected = transformed(points, basis, mean, rotation=rotation, tokens=tokens)
    out = torch.empty(39, 2, 16, dtype=dtype, device=device).transpose(0, 1)
    numbers, shrink, basis, mean = (on(device, each) for each in (numbers, shrink, basis, mean))
    points = Points(numbers, shrink, patches)
    rotation = Rotation(*(on(device, table) for table in rotation))
    gpu.reconstruct(points, basis, mean, out, rotation=rotation, tokens=tokens)
    assert_close(out.cpu(), expected, 400.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rich", [False, True])
def test_channels(dtype: torch.dtype, rich: bool, device: str) -> None:
    generator = torch.Generator().manual_seed(2)
    numbers = make_numbers(generator, (2 * 24, 70), torch.uint8, 0.5)
    options: dict[str, Any] = {}
    shrink = patches = rotation = None
    if rich:
        shrink = torch.rand(48, generator=generator)
        options = {
            "row_scale": torch.rand(48, generator=generator),
            "token_scale": torch.rand(70, generator=generator),
            "addend": torch.rand(48, 70, generator=generator),
        }
        rotation = make_rotation(generator, 40, 24)
        patches = make_patches(generator, (48, 70), 90)
    points = Points(numbers, shrink, patches)
    expected = placed(points, 2, tokens=slice(3, 43), rotation=rotation, **options)
    out = torch.empty(2, 40, 24, dtype=dtype, device=device)
    moved: dict[str, Any] = {name: on(device, factor) for name, factor in options.items()}
    if rotation is not None:
        moved["rotation"] = Rotation(*(on(device, table) for table in rotation))
    shrink = None if shrink is None else on(device, shrink)
    points = Points(on(device, numbers), shrink, patches)
    gpu.place_channels(points, out, tokens=slice(3, 43), **moved)
    assert_close(out.cpu(), expected, 50.0)


def test_digits_and_contexts(device: str) -> None:
    generator = torch.Generator().manual_seed(3)
    values = torch.randint(-3, 4, (7, 61), generator=generator).to(torch.int16)
    symbols = torch.randint(0, 256, (7, 61), generator=generator).to(torch.uint8)
    expected = torch.empty(7, 61, dtype=torch.uint8)
    native.contexts(values, expected)
    found = on(device, torch.empty_like(expected))
    gpu.contexts(on(device, values), found)
    assert torch.equal(found.cpu(), expected)
    finer = on(device, values.clone())
    gpu.refine(finer, on(device, symbols))
    native.refine(values, symbols)
    assert torch.equal(finer.cpu(), values)


def test_mistakes_of_the_caller(device: str) -> None:
    numbers = torch.zeros(8, 5, dtype=torch.uint8, device=device)
    out = torch.zeros(2, 5, 4, device=device)
    with pytest.raises(ParameterError, match=r"basis: expected shape \[2, 8, 4\]"):
        gpu.reconstruct(Points(numbers), torch.zeros(2, 7, 4, device=device), None, out)
    with pytest.raises(ParameterError, match="numbers: expected uint8 or int16"):
        gpu.place_channels(Points(numbers.int()), out)
    wide = torch.zeros(1, 5, 257, device=device)
    many = torch.zeros(257, 5, dtype=torch.uint8, device=device)
    with pytest.raises(ParameterError, match="at most 256 channels"):
        gpu.place_channels(Points(many), wide)
    with pytest.raises(ParameterError, match="tokens: expected 5 consecutive"):
        gpu.place_channels(Points(numbers), out, tokens=slice(0, 3))
    tables = Rotation(torch.zeros(5, 4, device=device), torch.zeros(5, 2, device=device))
    with pytest.raises(ParameterError, match="sin: expected shape"):
        gpu.place_channels(Points(numbers), out, rotation=tables)
    with pytest.raises(ParameterError, match="expected a tensor on the same GPU"):
        gpu.place_channels(Points(numbers.to("meta")), out)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("file", ["rans", "reconstruct"])
def test_nvcc_compiles(file: str, arch: str, tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc")
    folder = compiling.source_folder()
    subprocess.run(
        [
            nvcc,
            "-std=c++17",
            f"-arch={arch}",
            "-Werror",
            "all-warnings",
            "-cubin",
            f"-I{folder / 'include'}",
            "-o",
            str(tmp_path / "kernels.cubin"),
            str(folder / "kernels" / f"{file}.cu"),
        ],
        check=True,
    )


@pytest.mark.parametrize("file", ["rans", "reconstruct"])
def test_nvrtc_compiles(file: str) -> None:
    pytest.importorskip("cuda.core")
    cubin = compiling.compile_kernels(file, "sm_90")
    for kernel in compiling._KERNELS[file]:
        assert kernel.encode() in cubin


def test_cubins_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def compile_kernels(file: str, arch: str) -> bytes:
        made.append((file, arch))
        return b"cubin of " + file.encode()

    monkeypatch.setenv("KVRAG_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(compiling, "compile_kernels", compile_kernels)
    monkeypatch.setattr(compiling, "_compiler_version", lambda: "13.0")
    for _ in range(2):
        assert compiling._cached_cubin("rans", "sm_90") == b"cubin of rans"
    assert made == [("rans", "sm_90")]
    (kept,) = (tmp_path / "cache").iterdir()
    kept.write_bytes(kept.read_bytes()[:-1])
    assert compiling._cached_cubin("rans", "sm_90") == b"cubin of rans"
    monkeypatch.setattr(compiling, "_compiler_version", lambda: "13.1")
    compiling._cached_cubin("rans", "sm_90")
    assert len(made) == 3
    monkeypatch.setenv("KVRAG_CACHE", str(kept / "below-a-file"))
    assert compiling._cached_cubin("rans", "sm_90") == b"cubin of rans"


def test_the_extra_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cuda.core", None)
    with pytest.raises(ParameterError, match=r"pip install 'kvrag\[gpu\]'"):
        compiling.compile_kernels("rans", "sm_90")
