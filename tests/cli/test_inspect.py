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


@pytest.mark.slow
def test_what_eviction_keeps(run: Run, model_folder: Path, data: Path, tmp_path: Path) -> None:
    arguments = ("inspect", "--model", model_folder, "--data", data)
    picture = tmp_path / "kept.png"
    policy = ("--eviction-policy", "corm:window=4:recent=3")
    done = run(*arguments, "--eviction", picture, *policy)
    assert done.code == 0, done.err
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "corm(window=4, recent=3, threshold=1.0) keeps" in done.out
    assert "with the full cache:" in done.out
    done = run(*arguments, "--eviction", picture, *policy, "--json")
    kept = done.json["eviction"]["kept"]
    num_tokens = len(done.json["eviction"]["tokens"])
    assert [len(layer) for layer in kept] == [2] * 4
    assert all(
        head[-3:] == list(range(num_tokens - 3, num_tokens)) for layer in kept for head in layer
    )
    both = run(*arguments, "--eviction", picture, "--out", tmp_path / "out", "--json")
    assert both.json["spans"]
    assert both.json["eviction"]["policy"] == "corm(window=16, recent=16, threshold=1.0)"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "give --out DIR, or --eviction FILE.png"),
        (("--eviction", "kept.jpg"), "expected a name that ends in .png"),
        (("--eviction", "k.png", "--eviction-policy", "none"), "forgets nothing"),
        (("--eviction", "k.png", "--eviction-policy", "lru"), "unknown eviction 'lru'"),
        (("--eviction", "nowhere/k.png"), "there is no folder"),
    ],
)
def test_no_picture_of_eviction(
    run: Run, model_folder: Path, data: Path, options: tuple[str, ...], message: str
) -> None:
    done = run("inspect", "--model", model_folder, "--data", data, *options)
    assert done.code == 1
    assert message in done.err
