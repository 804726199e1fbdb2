from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvrag.fusion.compression.anchors import FILE_NAME, Anchors
from kvrag.fusion.links import FILE_NAME as LINKS_NAME
from tests.cli.conftest import Run

CONTEXTS = [
    {"title": "", "text": "Ines keeps the harbour ledger. She writes down every boat."},
    {"title": "", "text": "Tomas repairs the tall clock of Varn, near the old river bank."},
]
SMALL = ("--steps", 2, "--rows", 2, "--evaluate-questions", 2)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "set.json"
    asked: dict[str, Any] = {"answers": ["Tomas"], "ctxs": CONTEXTS}
    path.write_text(json.dumps([{**asked, "question": f"Who repairs {i}?"} for i in range(4)]))
    return path


@pytest.fixture
def anchored(run: Run, model_folder: Path, data: Path, tmp_path: Path) -> Path:
    out = tmp_path / "anchored"
    train = ("train", "anchors", "--model", model_folder, "--data", data, "--out", out, "--json")
    done = run(*train, *SMALL)
    assert done.code == 0, done.err
    assert done.json["anchors"] == str(out / FILE_NAME)
    assert {"anchors:0.5/linked/overall", "anchors:0.75/linked/overall"} <= done.json[
        "scores"
    ].keys()
    assert not (out / LINKS_NAME).exists()
    return out


def test_a_trained_model_stores_chunks_as_anchors_and_answers(
    run: Run, anchored: Path, documents: Path, tmp_path: Path
) -> None:
    assert Anchors.load(anchored / FILE_NAME).rates == (0.5, 0.75)
    sizes = []
    for compress in ("none", "anchors:0.5", "anchors:0.75"):
        index = tmp_path / compress
        ingest = ("ingest", documents, "--index", index, "--model", anchored)
        done = run(*ingest, "--embedding", "hashing", "--compress", compress)
        assert done.code == 0, done.err
        sizes.append(run("stats", "--index", index, "--json").json["size_bytes"])
        ask = ("query", "Who repairs the clock?", "--index", index, "--max-tokens", 2, "--json")
        report = run(*ask).json["report"]
        assert (report["num_compressed"] > 0) == (compress != "none")
        assert not report["misses"]
    assert sizes == sorted(sizes, reverse=True)
    refused = run(*ingest[:3], tmp_path / "other", *ingest[4:], "--compress", "anchors:0.6")
    assert refused.code == 1
    assert "trained for anchors:0.5, anchors:0.75, not for anchors:0.6" in refused.err


def test_links_are_trained_on_anchors(
    run: Run, anchored: Path, data: Path, documents: Path, tmp_path: Path
) -> None:
    for mode in ("tuned", "frozen"):
        out = tmp_path / mode
        train = ("train", "links", "--model", anchored, "--data", data, "--out", out, *SMALL)
        done = run(*train, "--anchors", "0.5,0.75", "--links", 2, "--mode", mode)
        assert done.code == 0, done.err
        model = out if mode == "tuned" else anchored
        assert (out / FILE_NAME).exists() == (mode == "tuned")
        index = tmp_path / f"{mode}-index"
        ingest = ("ingest", documents, "--index", index, "--model", model)
        done = run(*ingest, "--embedding", "hashing", "--compress", "anchors:0.75")
        assert done.code == 0, done.err
        ask = ("query", "Who repairs the clock?", "--index", index, "--max-tokens", 2, "--json")
        report = run(*ask, "--links", out / LINKS_NAME).json["report"]
        assert report["num_links"] > 0
        assert report["num_compressed"] > 0
    refused = run(*train, "--anchors", "0.5", "--links", 2)
    assert "holds anchors of the rates (0.5, 0.75)" in refused.err


def test_a_model_without_anchors_is_refused(
    run: Run, model_folder: Path, documents: Path, tmp_path: Path
) -> None:
    index = tmp_path / "index"
    ingest = ("ingest", documents, "--index", index, "--model", model_folder)
    refused = run(*ingest, "--embedding", "hashing", "--compress", "anchors:0.5")
    assert refused.code == 1
    assert "no anchors at" in refused.err
    assert not (index / "index.json").exists()
