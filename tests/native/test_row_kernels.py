"""Kernels in Triton: played by its interpreter they compute what PyTorch does, and they compile."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from importlib.util import find_spec
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvrag.native.gpu import compiling, tiled
from kvrag.native.gpu.rows import Norm, RowKernels, RowPlaces, RowTensors, Scores
from tests.support.properties import few

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="no Triton")

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3}
LAYERS, KEY_HEADS, HEAD_DIM, CAPACITY, WIDTH = 2, 2, 16, 130, 48
CPU = torch.device("cpu")


class Setting:
    """Rows in a bucket, a buffer full of NaN where nothing was written, and both executors."""

    def __init__(self, dtype: torch.dtype, group: int, num_rows: int, bucket: int) -> None:
        self.dtype, self.asked = dtype, group * KEY_HEADS
        made = torch.Generator().manual_seed(num_rows)
        self.made = made
        places = torch.randperm(CAPACITY - 20, generator=made)[:num_rows].sort().values
        self.last = int(places[-1])
        positions = torch.full((bucket,), 1 << 40)
        positions[:num_rows] = places
        tables = []
        for _ in range(2):
            angles = torch.randn(CAPACITY, HEAD_DIM // 2, generator=made).repeat(1, 2)
            tables.append((angles.cos().contiguous(), angles.sin().contiguous()))
        shape = (LAYERS, KEY_HEADS, CAPACITY, HEAD_DIM)
        keys, values = (torch.randn(shape, generator=made).to(dtype) for _ in range(2))
        keys[:, :, self.last + 1 :] = values[:, :, self.last + 1 :] = torch.nan
        self.places = [
            RowPlaces(
                positions,
                num_rows,
                tables,
                keys.clone(),
                values.clone(),
                self.last,
                torch.zeros(LAYERS, CAPACITY),
                num_rows // 2,
            )
            for _ in range(2)
        ]
        state = torch.tensor(self.places[0].state())
        self.kernels = RowKernels(positions, state, dtype, (self.asked, KEY_HEADS))
        self.tensors = RowTensors(self.places[1])
        self.num_rows, self.bucket = num_rows, bucket

    def rows(self, width: int) -> torch.Tensor:
        """Return rows of a bucket, those that mean nothing NaN."""
        made = torch.randn(self.bucket, width, generator=self.made).to(self.dtype)
        made[self.num_rows :] = torch.nan
        return made

    def assert_close(self, found: torch.Tensor, expected: torch.Tensor) -> None:
        tolerance = TOLERANCE[self.dtype]
        found, expected = found[: self.num_rows].float(), expected[: self.num_rows].float()
        assert not expected.isnan().any()
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.fixture(params=[torch.float32, torch.float16], ids=["float32", "float16"])
def setting(request: pytest.FixtureRequest) -> Setting:
    return Setting(request.param, group=3, num_rows=13, bucket=24)


@pytest.mark.parametrize("adds_one", [False, True])
@pytest.mark.parametrize("adds", [False, True])
def test_norms(setting: Setting, adds_one: bool, adds: bool) -> None:
    norm = Norm(torch.randn(WIDTH).to(setting.dtype), 1e-5, adds_one)
    rows, first = setting.rows(WIDTH), setting.rows(WIDTH)
    second = first.clone()
    setting.kernels.norm(rows, norm, first, adds=adds)
    setting.tensors.norm(rows, norm, second, adds=adds)
    setting.assert_close(first, second)


@pytest.mark.parametrize("is_gelu", [False, True])
def test_gates(setting: Setting, is_gelu: bool) -> None:
    gate, up = setting.rows(WIDTH), setting.rows(WIDTH)
    first, second = torch.empty_like(gate), torch.empty_like(gate)
    setting.kernels.gated(gate, up, first, is_gelu)
    setting.tensors.gated(gate, up, second, is_gelu)
    setting.assert_close(first, second)


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("adds_one", [False, True])
def test_rotations(setting: Setting, has_norms: bool, adds_one: bool) -> None:
    norms = None
    if has_norms:
        weights = torch.randn(2, HEAD_DIM).to(setting.dtype)
        norms = Norm(weights[0], 1e-6, adds_one), Norm(weights[1], 1e-6, adds_one)
    widths = setting.asked * HEAD_DIM, KEY_HEADS * HEAD_DIM, KEY_HEADS * HEAD_DIM
    query, key, value = map(setting.rows, widths)
    first, second = query.clone(), query.clone()
    setting.kernels.rotate((first, key.clone(), value), norms, 1, 1, HEAD_DIM)
    setting.tensors.rotate((second, key, value), norms, 1, 1, HEAD_DIM)
    setting.assert_close(first, second)
    kernels, tensors = setting.places
    for ours, theirs in ((kernels.keys, tensors.keys), (kernels.values, tensors.values)):
        tolerance = TOLERANCE[setting.dtype]
        torch.testing.assert_close(
            torch.stack(list(ours)),
            torch.stack(list(theirs)),
            rtol=tolerance,
            atol=tolerance,
            equal_nan=True,
        )


@pytest.mark.parametrize(
    ("window", "softcap", "programs"),
    few(
        4,
        [
            *((None, 0.0, 264), (20, 2.0, 264), (None, 2.0, 1), (20, 0.0, 1)),
            *((20, 0.0, 264), (None, 2.0, 264), (None, 0.0, 1), (20, 2.0, 1)),
        ],
    ),
)
def test_attention_and_mass(
    setting: Setting,
    window: int | None,
    softcap: float,
    programs: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Few programs: one split, and blocks of keys that a program takes by turns.
    monkeypatch.setattr("kvrag.native.gpu.rows._PROGRAMS", programs)
    scores = Scores(HEAD_DIM**-0.5, softcap, window)
    query = setting.rows(setting.asked * HEAD_DIM)
    first, second = torch.empty_like(query), torch.empty_like(query)
    setting.kernels.attend(query, first, 1, scores, HEAD_DIM)
    setting.tensors.attend(query, second, 1, scores, HEAD_DIM)
    setting.assert_close(first, second)
    setting.kernels.attend(query, first, 1, scores, HEAD_DIM)  # counters are as they were
    setting.assert_close(first, second)
    if programs > 1:
        monkeypatch.setattr("kvrag.native.gpu.rows._PROGRAMS", 2)
    setting.kernels.mass(query, 1, scores, HEAD_DIM)
    setting.tensors.mass(query, 1, scores, HEAD_DIM)
    mine, others = (places.mass for places in setting.places)
    assert bool(others.any())
    tolerance = 5 * TOLERANCE[setting.dtype]
    torch.testing.assert_close(mine, others, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("arch", tiled.ARCHITECTURES)
def test_tiles_of_every_card_hold_all_rows(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled, "architecture", lambda _: arch)
    for head_dim, group, num_rows in product((16, 64, 128, 256), (1, 4), (1, 31, 40, 781, 4096)):
        started: list[tuple[tuple[int, ...], dict[str, int]]] = []

        class Kernels(RowKernels):
            def _start(self, name: str, grid: Any, *_: object, **constants: int) -> None:
                started.append((grid, constants))  # noqa: B023

        kernels = Kernels(torch.zeros(num_rows), torch.zeros(1), torch.bfloat16, (group, 1))
        rows = torch.empty(0)
        kernels.attend(rows, rows, 0, Scores(1.0), head_dim)
        ((num_tiles, _, splits), constants) = started[0]
        block = tiled.PROGRAMS["attend"].tiling(constants, arch).constants["BM"]
        assert num_tiles * block >= num_rows * group
        assert num_tiles <= len(kernels._counters)
        assert constants["WHOLE"] == (splits == 1)


def test_a_stream_is_told_by_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[Any, ...]] = []
    core = SimpleNamespace(
        Device=lambda _: SimpleNamespace(set_current=lambda: None),
        LaunchConfig=dict,
        Stream=SimpleNamespace(from_handle=lambda address: f"stream {address}"),
        launch=lambda *given: started.append(given),
    )
    monkeypatch.setattr(compiling, "_cuda_core", lambda: core)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    # As PyTorch's before 2.10: it knows nothing of other libraries' streams.
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=77))
    given: Any = torch.zeros(4), 3, 0.5, None
    compiling.launch_function(
        "kernel", torch.device("cuda", 0), (2, 1), given, num_threads=64, shared_bytes=9
    )
    ((stream, config, function, address, number, real, nothing),) = started
    assert (stream, function) == ("stream 77", "kernel")
    assert config == {"grid": (2, 1), "block": 64, "shmem_size": 9}
    assert (address, number, real.value, nothing) == (given[0].data_ptr(), 3, 0.5, 0)


def test_kernels_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = {"GELU": 0}
    assert tiled.is_ready("gated", torch.float32, CPU, **flags)
    monkeypatch.setenv(tiled.VARIABLE, "off")
    assert not tiled.is_ready("gated", torch.float32, CPU, **flags)


_SPECIALISED = """
import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import create_function_from_signature
from kvrag.native.gpu import compiling, tiled

DIFFERS = {"num_skipped", "first_layer", "capacity", "layer", "table", "most_rows", "window"}
for name, program in tiled.PROGRAMS.items():
    kernel = getattr(tiled.sources(program.file), name)
    bind = create_function_from_signature(
        kernel.signature, kernel.params, CUDABackend(GPUTarget("cuda", 90, 32))
    )
    constants = next(program.variants())
    constants = {**constants, **program.tiling(constants, "sm_90").constants}
    found = set()
    for value in (0, 1, 7, 32, 1 << 40):
        given = []
        for argument, kind in program.arguments.items():
            number = 0.5 if kind == "fp32" else value if argument in DIFFERS else 64
            if value == 1 << 40 and argument != "window" and kind != "fp32":
                number = 64  # only a window's absence is as large
            given.append(torch.empty(64) if kind.startswith("*") else number)
        found.add(str(bind(*given, **constants)[1]))
    assert len(found) == 1, (name, found)
"""


def test_no_layer_and_no_prompt_compiles_kernels_again() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", _SPECIALISED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_kernels_compile_ahead_of_time_without_spills_and_with_matrix_instructions(
    tmp_path: object,
) -> None:
    command = [sys.executable, "-m", "tools.aot", "--arch", "sm_90", "--head-dim", "128"]
    command += ["--dtype", "bf16", "--out", str(tmp_path), "--json"]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    for name in tiled.PROGRAMS:
        assert any(key.startswith(f"{name}-bf16") for key in made), name
    for key, told in made.items():
        assert told["spills"] == 0, key
        assert 0 < told["registers"] <= 255
        if key.startswith(("attend", "mass")):
            assert told["matrix"] > 0, key
