"""The gate on the size of the house: what it counts, and that a rise needs a reason."""

import json
from pathlib import Path

import pytest

from tools import size

SOURCE = '''\
"""A docstring
of two lines."""

import os  # a comment


def few(a, b, *, c): ...


class Wide:
    """One line."""

    def many(self, a, b, c, d, e, f, g):
        """Say."""
        text = """kept
        as code"""
        return text

    def _hidden(self): ...
'''


def test_code_is_counted_without_docstrings_comments_and_blank_lines() -> None:
    assert size.code_lines(SOURCE) == 8
    assert size.code_lines("") == 0


def run(monkeypatch: pytest.MonkeyPatch, record: Path, number: int, *words: str) -> None:
    monkeypatch.setattr(size, "RECORD", record)
    monkeypatch.setattr(size, "measure", lambda: {"modules": number})
    monkeypatch.setattr("sys.argv", ["size", *words])
    size.main()


def test_a_rise_needs_a_reason_and_a_fall_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    record = tmp_path / "size.json"
    run(monkeypatch, record, 5, "--save")
    run(monkeypatch, record, 5)
    for words in ([], ["--save"], ["--reason", "a feature"]):
        with pytest.raises(SystemExit, match=r"modules.*make size REASON"):
            run(monkeypatch, record, 6, *words)
    assert json.loads(record.read_text()) == {"modules": {"number": 5}}
    run(monkeypatch, record, 6, "--save", "--reason", "a feature")
    assert json.loads(record.read_text()) == {"modules": {"number": 6, "reason": "a feature"}}
    run(monkeypatch, record, 4)
    assert json.loads(record.read_text())["modules"]["number"] == 6
    run(monkeypatch, record, 4, "--save", "--seconds", "600")
    assert json.loads(record.read_text()) == {
        "modules": {"number": 4, "reason": "a feature"},
        "seconds of make test": {"number": 600},
    }
