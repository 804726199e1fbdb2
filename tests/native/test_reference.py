"""The kernels' reference, for where none were compiled, against the compiled ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from kvrag.native import kernels as chosen
from kvrag.native import reference

compiled = pytest.importorskip("kvrag._native")

ROOT = Path(__file__).parents[2]

# An index without a network, encoded, coded, decoded and fused.
END_TO_END = """
import sys
import kvrag
from kvrag.native import instruction_set

with kvrag.Index.create(sys.argv[1], model="kvrag-tiny", embedding="hashing",
                        codec="transform:1", chunk_tokens=64) as index:
    index.add(kvrag.Document("lease", "Ines Varga signed the lease in 2019. " * 12))
    chunks = [hit.chunk.text for hit in index.search("Who signed the lease?", k=2)]
    answer = kvrag.KVEngine(index).generate(
        "\\n\\n".join([*chunks, "Who signed the lease?"]), max_tokens=8
    )
    assert answer.report.num_reused > 0
    print(instruction_set(), repr(answer.text))
"""


def run(code: str, *arguments: str, isa: str | None, blocked: bool = False) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "KVRAG_ISA"}
    if isa is not None:
        environment["KVRAG_ISA"] = isa
    if blocked:  # as if it had not been compiled
        code = "import sys; sys.modules['kvrag._native'] = None\n" + code
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_it_has_every_function_of_the_compiled_module() -> None:
    names = {name for name in vars(compiled) if not name.startswith("_")}
    # Without it, a model's own modules compute.
    assert names - {"Layers"} == set(reference.__all__)
    assert reference.INT8_PANEL == compiled.INT8_PANEL


def test_payloads_are_the_same_bytes() -> None:
    rng = np.random.default_rng(1)
    frequencies = rng.multinomial(4096 - 40, np.full(40, 1 / 40), size=6).astype(np.uint16) + 1
    symbols = rng.integers(0, 40, (37, 203)).astype(np.uint8)
    classes = rng.integers(0, 4, 37).astype(np.uint16)
    contexts = rng.integers(0, 3, symbols.shape).astype(np.uint8)
    for num_streams in (1, 5):
        payloads = [
            module.encode(module.Model(frequencies), symbols, classes, contexts, num_streams, 1)
            for module in (compiled, reference)
        ]
        assert payloads[0] == payloads[1]
        out = np.zeros_like(symbols)
        job = (
            reference.Model(frequencies),
            np.frombuffer(payloads[0], np.uint8),
            classes,
            out,
            contexts,
        )
        assert reference.decode([job], 1) == [(0, 0, 0, 0)]
        assert (out == symbols).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_agrees(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    # More rows than fit a block of scores.
    monkeypatch.setattr(reference, "_MAX_SCORES", 4 * 50 * 3)
    generator = torch.Generator().manual_seed(2)
    query = torch.randn(4, 11, 16, generator=generator).to(dtype)
    key, value = (torch.randn(2, 50, 16, generator=generator).to(dtype) for _ in range(2))
    lasts = np.array([3, 7, 9, 20, 21, 22, 30, 35, 40, 48, 49], np.int64)
    bits = [
        one.view(torch.int16) if dtype == torch.bfloat16 else one for one in (query, key, value)
    ]
    found, masses = [], []
    for module in (compiled, reference):
        out = torch.zeros(11, 4, 16, dtype=dtype)
        raw = out.view(torch.int16) if dtype == torch.bfloat16 else out
        mass = np.ones((2, 50), np.float32)
        module.attend(*(one.numpy() for one in bits), lasts, raw.numpy(), 12, 0.3, 5.0, mass, 4, 1)
        found.append(out.float())
        masses.append(mass)
    assert torch.allclose(found[0], found[1], atol=1e-2 if dtype == torch.bfloat16 else 1e-5)
    assert np.allclose(masses[0], masses[1], atol=1e-4)


def test_the_compiled_kernels_come_first() -> None:
    assert run("import kvrag.native as n; print(n.instruction_set())", isa=None) != "reference"


@pytest.mark.slow
def test_without_a_compiled_module_answers_are_the_same(tmp_path: Path) -> None:
    usual = run(END_TO_END, str(tmp_path / "usual"), isa=None)
    for name, options in {
        "asked": {"isa": "reference"},
        "missing": {"isa": None, "blocked": True},
    }.items():
        printed = run(END_TO_END, str(tmp_path / name), **options)
        assert printed.split(maxsplit=1) == ["reference", usual.split(maxsplit=1)[1]]


@pytest.mark.slow
def test_the_kernels_tests_pass_on_the_reference() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "tests/native"],
        capture_output=True,
        text=True,
        env={**os.environ, "KVRAG_ISA": chosen.REFERENCE},
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]


def test_a_module_that_cannot_be_loaded_is_told(tmp_path: Path) -> None:
    broken = tmp_path / "_native.so"
    broken.write_bytes(b"not a library")
    code = (
        "import sys, kvrag, importlib.util as u\n"
        f"spec = u.spec_from_file_location('kvrag._native', {str(broken)!r})\n"
        "sys.meta_path.insert(0, type('F', (), {'find_spec': staticmethod("
        "lambda name, *_: spec if name == 'kvrag._native' else None)}))\n"
        "try:\n    import kvrag.native\nexcept ImportError as error:\n    print(error.path)\n"
    )
    assert run(code, isa=None) == str(broken)
