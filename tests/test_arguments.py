"""Checks of callers' arguments: paths, and values that messages quote."""

from pathlib import Path
from typing import Any

import pytest

from kvrag import arguments
from kvrag.errors import ParameterError

LONG = "x" * 1_000_000


def refused(value: Any) -> str:
    with pytest.raises(ParameterError) as caught:
        arguments.path(value, "path")
    said = str(caught.value)
    assert said.startswith("path ")
    assert len(said) < 400
    return said


@pytest.fixture
def loop(tmp_path: Path) -> Path:
    """A link to itself."""
    link = tmp_path / "loop"
    link.symlink_to("loop")
    return link


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("", "path '': expected a path to a file or folder"),
        (b"x", "path b'x': expected a path to a file or folder"),
        (5, "path 5: expected a path to a file or folder"),
        ("~nosuchuser/x", "path '~nosuchuser/x': expected the name of a user with a home folder"),
        ("a\0b", "path 'a\\x00b': expected a path without zero bytes"),
        ("\ud800", "path '\\ud800': expected a path that the system can encode"),
        ("a" * 300, "a shorter name"),
        ("a/" * 5000, "a shorter name"),
        (LONG, "a shorter name"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_what_is_no_path(value: Any, said: str) -> None:
    assert said in refused(value)
    if isinstance(value, str) and value:
        assert said in refused(Path(value))


def test_links_in_a_circle(loop: Path) -> None:
    assert f"path '{loop}': expected no links that lead in a circle" in refused(loop)
    assert "in a circle" in refused(loop / "below")


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    assert arguments.path("~/x", "path") == tmp_path / "x"
    assert arguments.path("not/there", "path") == Path("not/there")
    assert arguments.path("caf\udce9", "path") == Path("caf\udce9")
    assert arguments.resolved_path("link/x", "path") == tmp_path / "folder" / "x"


class Odd:
    def __repr__(self) -> str:
        raise RuntimeError("no words for it")


def test_what_a_message_quotes_is_short() -> None:
    assert arguments.shown("a\nb") == "'a\\nb'"
    assert arguments.shown("x" * 198) == repr("x" * 198)
    assert arguments.shown(LONG) == "'" + "x" * 196 + "..."
    assert arguments.cut(LONG) == "x" * 197 + "..."
    assert arguments.shown(10**5000) == "a value of type int"
    assert arguments.shown(Odd()) == "a value of type Odd"
