from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvrag.fusion.links import FILE_NAME, LinkTokens
from tests.cli.conftest import Run

CONTEXTS = [
    {"title": "", "text": "Ines keeps the harbour ledger. She writes down every boat."},
    {"title": "", "text": "Tomas repairs the tall clock of Varn, near the old river bank."},
]
SMALL = ("--steps", 2, "--rows", 2, "--links", 2, "--evaluate-questions", 2)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "set.json"
    asked: dict[str, Any] = {"answers": ["Tomas"], "ctxs": CONTEXTS}
    path.write_text(json.dumps([{**asked, "question": f"Who repairs {i}?"} for i in range(4)]))
    return path


def test_a_tuned_model_answers_with_its_links(
    run: Run, model_folder: Path, data: Path, documents: Path, tmp_path: Path
) -> None:
    out = tmp_path / "tuned"
    done = run(
        "train", "links", "--model", model_folder, "--data", data, "--out", out, *SMALL, "--json"
    )
    assert done.code == 0, done.err
    assert done.json["steps"] == 2
    assert {"linked/overall", "plain/overall"} <= done.json["scores"].keys()
    index = tmp_path / "index"
    done = run("ingest", documents, "--index", index, "--model", out, "--embedding", "hashing")
    assert done.code == 0, done.err
    ask = ("query", "Who repairs the clock?", "--index", index, "--max-tokens", 2, "--json")
    assert run(*ask).json["report"]["num_links"] > 0
    assert run(*ask, "--links", "off").json["report"]["num_links"] == 0


def test_frozen_links_serve_an_index_that_was_there_before(
    run: Run, model_folder: Path, data: Path, index_folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "frozen"
    train = ("train", "links", "--model", model_folder, "--data", data, "--out", out, *SMALL)
    done = run(*train, "--mode", "frozen", "--loss", "distill", "--rank", 2)
    assert done.code == 0, done.err
    assert "linked, overall" in done.out
    assert LinkTokens.load(out / FILE_NAME).header.way == "adapter"
    ask = ("query", "Who repairs the clock?", "--index", index_folder, "--max-tokens", 2, "--json")
    assert run(*ask, "--links", out / FILE_NAME).json["report"]["num_links"] > 0
    assert run(*ask).json["report"]["num_links"] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--mode", "thawed"), "mode 'thawed': expected one of tuned, frozen"),
        (("--way", "kv"), "way 'kv': expected one of embeddings, adapter"),
        (("--loss", "none"), "loss 'none'"),
        (("--rank", "4"), "--rank 4 is of --way adapter"),
        (("--mode", "frozen", "--plain-share", "0.5"), "--plain-share 0.5 is of --mode tuned"),
        (
            ("--mode", "frozen", "--way", "embeddings", "--learning-rate", "0.1"),
            "--learning-rate 0.1 is of --mode tuned and --way adapter",
        ),
        (("--device", "toaster"), "device 'toaster' cannot be used"),
        (("--seed", "99999999999999999999"), "expected 0 to 2**63 - 1"),
        (("--data", "absent.json"), "no data set at 'absent.json'"),
        (("--model", "./absent"), "no model at './absent'"),
    ],
)
def test_what_cannot_be_trained_is_named(
    run: Run, model_folder: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    out = tmp_path / "out"
    done = run("train", "links", "--model", model_folder, "--out", out, *SMALL, *arguments)
    assert done.code == 1
    assert message in done.err
    assert not out.exists()


def test_links_that_are_absent_are_named(run: Run, index_folder: Path) -> None:
    done = run("query", "who?", "--index", index_folder, "--links", "absent.safetensors")
    assert done.code == 1
    assert "no links at 'absent.safetensors'" in done.err
