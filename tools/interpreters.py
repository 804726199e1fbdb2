"""Finds versions of Python on this machine, with uv."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

UV = (sys.executable, "-m", "uv")
OLDEST = (3, 11)


def environment() -> dict[str, str]:
    """Return the environment for uv: it looks in PATH, so pyenv's versions are in there.

    A version that is not on this machine is an error, no download.
    """
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    folders = [*sorted(map(str, root.glob("versions/*/bin")), reverse=True), os.environ["PATH"]]
    return {"UV_PYTHON_DOWNLOADS": "never", **os.environ, "PATH": os.pathsep.join(folders)}


def installed() -> list[str]:
    """Return the versions of CPython on this machine that kvrag supports, oldest first."""
    listed = _uv("python", "list", "--only-installed", "--output-format", "json")
    found = {
        (one["version_parts"]["major"], one["version_parts"]["minor"])
        for one in json.loads(listed.stdout)
        if one["implementation"] == "cpython"
    }
    return [f"{major}.{minor}" for major, minor in sorted(found) if (major, minor) >= OLDEST]


def find(version: str) -> str | None:
    """Return the path of an interpreter of a version; None if there is none."""
    return _uv("python", "find", "--system", version, check=False).stdout.strip() or None


def named(python: str) -> str:
    """Return the absolute path of an interpreter that a user names by path or version.

    The commands that get it run in other folders.
    """
    if path := find(python):
        return path
    raise argparse.ArgumentTypeError(
        f"expected a version of Python on this machine or an interpreter's path, found {python!r}"
    )


def _uv(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*UV, *arguments], capture_output=True, text=True, check=check, env=environment()
    )
