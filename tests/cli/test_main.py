"""The entry point: help, version, and what is loaded before any work begins."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

import kvrag
from tests.cli.conftest import Run


def test_version(run: Run) -> None:
    assert run("--version").out == f"kvrag {kvrag.__version__}\n"


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ({}, {"GOMP_SPINCOUNT": "10000"}),
        ({"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT": "7"}),
        ({"OMP_WAIT_POLICY": "active"}, {"OMP_WAIT_POLICY": "active"}),
    ],
)
def test_threads_spin_for_a_bounded_time_unless_the_environment_says_how_they_wait(
    given: dict[str, str], used: dict[str, str]
) -> None:
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    code = (
        "import os, sys; sys.argv = ['kvrag', '--version']\n"
        "from kvrag.cli.main import run\n"
        "try: run()\n"
        "except SystemExit: pass\n"
        f"print({{name: os.environ[name] for name in {names} if name in os.environ}})\n"
    )
    others = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=others | given
    )
    assert done.stdout.splitlines()[-1] == str(used)


@pytest.mark.parametrize(("before", "after"), [((700, 10, 10), 10_000), ((0, 10, 10), 0)])
def test_garbage_is_collected_less_often_and_not_at_the_end(
    before: tuple[int, int, int], after: int
) -> None:
    code = (
        "import gc, sys; sys.argv = ['kvrag', '--version']\n"
        f"gc.set_threshold(*{before})\n"
        "from kvrag.cli.main import run\n"
        "try: run()\n"
        "except SystemExit: pass\n"
        "print(gc.isenabled(), gc.get_threshold(), gc.get_freeze_count() > 10_000)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == f"True {(after, *before[1:])} True"


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_triton_says_nothing_at_the_end() -> None:
    code = "import sys, torch, triton; sys.argv = ['kvrag', '--version']\n"
    code += "from kvrag.cli.main import run\nrun()\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("kvrag ")
    assert done.stderr == ""
