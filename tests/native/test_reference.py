"""Without compiled kernels: the codecs' reference against them, and a model's own modules."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvrag.native import kernels as chosen
from kvrag.native import reference

compiled = pytest.importorskip("kvrag._native")

ROOT = Path(__file__).parents[2]

# An index without a network, encoded, coded, decoded and fused.
END_TO_END = """
import sys
import kvrag
from kvrag.native.kernels import instruction_set

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


def test_it_has_what_codecs_call() -> None:
    models = {"Layers", "attend", "attend_each", "gate", "int8_linear", "linear", "norm", "rotate"}
    models |= {"GroupedWeights", "grouped_linear", "grouped_rows"}
    models |= {"Bands", "pack", "place_packed"}  # `place_rows`
    names = {name for name in vars(compiled) if not name.startswith("_")}
    assert all(hasattr(reference, name) for name in names - models)
    assert reference.INT8_PANEL == compiled.INT8_PANEL
    assert reference.GROUP == compiled.GROUP


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
def test_the_codecs_kernels_pass_their_tests_on_the_reference() -> None:
    names = ("damage", "entropy", "reconstruction")
    files = [f"tests/native/test_{name}.py" for name in names]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "not slow", *files],
        capture_output=True,
        text=True,
        env={**os.environ, "KVRAG_ISA": chosen.REFERENCE},
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.slow
def test_a_module_that_cannot_be_loaded_is_told(tmp_path: Path) -> None:
    broken = tmp_path / "_native.so"
    broken.write_bytes(b"not a library")
    code = (
        "import sys, kvrag, importlib.util as u\n"
        f"spec = u.spec_from_file_location('kvrag._native', {str(broken)!r})\n"
        "sys.meta_path.insert(0, type('F', (), {'find_spec': staticmethod("
        "lambda name, *_: spec if name == 'kvrag._native' else None)}))\n"
        "try:\n    import kvrag.native.kernels\n"
        "except ImportError as error:\n    print(error.path)\n"
    )
    assert run(code, isa=None) == str(broken)
