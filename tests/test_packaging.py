"""What the package promises to whoever installs or imports it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import kvrag

ROOT = Path(__file__).parent.parent
HEAVY = (
    "torch",
    "transformers",
    "numpy",
    "faiss",
    "sentence_transformers",
    "langchain_core",
    "llama_index",
)


def run_python(code: str) -> str:
    """Run `code` in a fresh interpreter and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def heavy_modules_after(code: str) -> list[str]:
    """Return the heavy packages that are loaded once `code` has run."""
    probe = f"\nimport sys; print('|', *[m for m in {HEAVY!r} if m in sys.modules])"
    return run_python(code + probe).rpartition("|")[2].split()


def test_import_loads_no_heavy_package() -> None:
    assert heavy_modules_after("import kvrag") == []


def test_imports_point_down() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_version_is_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert kvrag.__version__ == project["version"]


def test_unknown_attribute_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        kvrag.no_such_name  # noqa: B018


def test_licence_is_apache() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "Copyright 2026 the kvrag authors" in text


def test_dependencies_are_bounded_on_both_sides() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = [*project["dependencies"]]
    for extra in project["optional-dependencies"].values():
        listed += [name for name in extra if not name.startswith("kvrag[")]
    loose = [name for name in listed if ">=" not in name or "<" not in name]
    assert loose == []


def test_readme_names_things_that_exist() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        for line in ast.parse(block).body:
            if isinstance(line, ast.Import | ast.ImportFrom):
                exec(ast.unparse(line), {})
