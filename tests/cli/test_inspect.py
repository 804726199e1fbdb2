from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.cli.test_bench_quality import CONTEXTS


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "set.json"
    asked = {"question": "Who repairs the clock?", "answers": ["Tomas"], "ctxs": CONTEXTS}
    path.write_text(json.dumps([asked]))
    return path


def test_pictures_and_numbers(run: Run, model_folder: Path, data: Path, tmp_path: Path) -> None:
    arguments = ("inspect", "--model", model_folder, "--data", data, "--out", tmp_path / "out")
    done = run(*arguments, "--json")
    assert done.code == 0, done.err
    assert len(done.json["spans"]) == 2
    assert len(list((tmp_path / "out").glob("*.png"))) == 3
    done = run(*arguments, "--policies", "deviation")
    assert done.code == 0, done.err
    assert "deviation computes again:" in done.out
    done = run(*arguments, "--question", 3)
    assert done.code == 1
    assert "has 1, from 0" in done.err
    done = run(*arguments, "--policies", "best")
    assert done.code == 1
    assert "unknown policy 'best'" in done.err
