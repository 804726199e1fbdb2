from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run

CONTEXTS = [
    {"title": "", "text": "Ines keeps the harbour ledger. She writes down every boat."},
    {"title": "", "text": "Tomas repairs the tall clock of Varn, near the old river bank."},
]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "set.json"
    asked = {"question": "Who repairs the clock?", "answers": ["Tomas"], "ctxs": CONTEXTS}
    path.write_text(json.dumps([asked, {**asked, "question": "Who keeps the ledger?"}]))
    return path


def test_table_for_a_person(run: Run, model_folder: Path, data: Path) -> None:
    done = run(
        *("bench", "quality", "--model", model_folder, "--data", data, "--questions", 1),
        *("--policies", "boundary", "--ratios", "1", "--max-tokens", 3, "--no-chat"),
    )
    assert done.code == 0, done.err
    assert "overall, 1 questions" in done.out
    assert "full prefill" in done.out
    assert "boundary 100%" in done.out
    assert "+0.0 (+0.0 to +0.0)" in done.out
    # The policy, and the question without its documents.
    assert "2.0 contestants a question took" in done.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--eviction", "lru"), "unknown eviction 'lru'"),
        (("--policies", " ,"), "--policies"),
        (("--policies", "best"), "unknown policy 'best'"),
        (("--codecs", "zip"), "no codec 'zip'"),
        (("--ratios", "0.1,many"), "--ratios '0.1,many'"),
        (("--ratios", "1.5"), "--ratios '1.5'"),
        (("--data", "absent.json"), "no data set at 'absent.json'"),
        (("--picture", "quality.jpg"), "ends in .png"),
        (("--model", "./absent"), "no model at './absent'"),
    ],
)
def test_what_cannot_be_judged_is_named(
    run: Run, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, str], message: str
) -> None:
    from kvrag.models.kv_model import KVModel

    def load(*_: Any, **__: Any) -> None:
        pytest.fail("the model was loaded")

    monkeypatch.setattr(KVModel, "load", load)
    done = run("bench", "quality", *arguments)
    assert done.code == 1
    assert message in done.err


def test_contexts_side_by_side(run: Run, model_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "alone.json"
    ctxs = [{**CONTEXTS[1], "before": [CONTEXTS[0]["text"]]}]
    path.write_text(
        json.dumps(
            [
                {
                    "question": "Who keeps it?",
                    "answers": ["unknown"],
                    "document_answers": ["Ines"],
                    "ctxs": ctxs,
                }
            ]
        )
    )
    common = ("bench", "quality", "--model", model_folder, "--data", path, "--policies", "none")
    done = run(*common, "--context", "none,document", "--max-tokens", 2)
    assert done.code == 0, done.err
    assert "none, document" in done.out
    assert "by documents" in done.out
    refused = run(*common, "--compress", "none,drop:0.5", "--picture", tmp_path / "p.png")
    assert refused.code == 1
    assert "--picture shows one compression" in refused.err
    done = run(*common, "--compress", "none,drop:0.5", "--max-tokens", 2)
    assert done.code == 0, done.err
    assert "none, drop:0.5" in done.out
