"""`make matrix` tests what it says: the oldest libraries, and every version of Python."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tools import interpreters, matrix

ROOT = Path(__file__).parents[1]


def named() -> list[str]:
    """Return the versions of Python that pyproject.toml names."""
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    return [one.split()[-1] for one in classifiers if re.search(r"Python :: 3\.\d+$", one)]


def test_hosted_runs_test_the_versions_that_are_named() -> None:
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    (listed,) = re.findall(r"^ +python: \[(.+)\]$", text, re.MULTILINE)
    assert re.findall(r"[\d.]+", listed) == named()


def test_a_named_version_that_is_not_here_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    first, *others = named()
    monkeypatch.setattr(interpreters, "installed", lambda: [first])
    monkeypatch.setattr("sys.argv", ["matrix"])
    with pytest.raises(SystemExit) as ended:
        matrix.main()
    assert ", ".join(others) in str(ended.value)
    assert f'MATRIX="{first} /path/to/python{others[0]}"' in str(ended.value)


@pytest.mark.parametrize(
    ("argv", "tried"), [(["./py"], ["/here/py"]), ([], [*named(), "3.99"])], ids=["named", "found"]
)
def test_versions_that_were_named_or_found_are_tried(
    monkeypatch: pytest.MonkeyPatch, argv: list[str], tried: list[str]
) -> None:
    monkeypatch.setattr(interpreters, "installed", lambda: [*named(), "3.99"])
    monkeypatch.setattr(interpreters, "find", {"./py": "/here/py"}.get)
    monkeypatch.setattr("sys.argv", ["matrix", "--resolution", "highest", *argv])
    seen = []
    monkeypatch.setattr(matrix, "_try", lambda version, *_: seen.append(version) or True)
    with pytest.raises(SystemExit) as ended:
        matrix.main()
    assert ended.value.code == 0
    assert seen == tried


@pytest.mark.parametrize("resolution", matrix.RESOLUTIONS)
def test_libraries_are_resolved_from_what_the_distributions_ask_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resolution: str
) -> None:
    steps: list[tuple[str, ...]] = []

    def run(step: tuple[str, ...], **_: Any) -> subprocess.CompletedProcess[str]:
        steps.append(step)
        return subprocess.CompletedProcess(step, 0)

    monkeypatch.setattr(matrix.shutil, "copytree", lambda *_: None)
    monkeypatch.setattr(matrix.subprocess, "run", run)
    assert matrix._try("3.11", resolution, tmp_path, tmp_path)
    (resolve,) = (number for number, step in enumerate(steps) if "compile" in step)
    words = steps[resolve]
    assert words[words.index("--resolution") + 1] == resolution
    assert {"pyproject.toml", str(ROOT / "bench" / "pyproject.toml")} <= set(words)
    held = words[words.index("--output-file") + 1]
    installing = [step for step in steps if any(word.startswith("kvrag[") for word in step)]
    assert len(installing) == 2
    for step in installing:
        assert step[step.index("--constraints") + 1] == held
        assert steps.index(step) > resolve
