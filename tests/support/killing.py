"""Python programs that are killed while they work."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

ROOT = Path(__file__).parents[2]

# What follows has imported everything and defines `work`; each call of it is a child that is
# forked before any computing thread exists.
_FORKING = """
import os, sys, torch
torch.set_num_threads(1)
{code}
print("ready", flush=True)
for line in iter(sys.stdin.readline, ""):
    if line == "reap\\n":
        os.wait()
        print("reaped", flush=True)
        continue
    child = os.fork()
    if child:
        print(child, flush=True)
        continue
    work(*line.split())
    os._exit(0)
"""


def lines_until_killed(code: str, *arguments: object, seconds: float) -> list[str]:
    """Run a program, kill it `seconds` after its first line, and return its lines."""
    child = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    with child.stdout:
        first = child.stdout.readline()
        time.sleep(seconds)
        child.kill()
        child.wait()
        return (first + child.stdout.read()).splitlines()


class Forking:
    """A process whose children call `work`, which its code defines, until they are killed."""

    def __init__(self, code: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", _FORKING.format(code=code)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert self._told() == "ready"

    def start(self, *arguments: object) -> int:
        """Start a child; return its number."""
        return int(self._ask(" ".join(map(str, arguments))))

    def kill(self, child: int) -> None:
        """Send SIGKILL to a child that may have ended."""
        os.kill(child, signal.SIGKILL)  # not reaped yet, so the number is still its own
        assert self._ask("reap") == "reaped"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def _ask(self, what: str) -> str:
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        return self._told()

    def _told(self) -> str:
        return self._process.stdout.readline().strip()
