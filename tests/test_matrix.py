"""`make matrix` tests what it says: the oldest libraries, and every version of Python."""

import re
import tomllib
from pathlib import Path

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
