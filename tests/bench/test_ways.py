"""Trials of ways to close the gap to full prefill."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from kvrag.models.kv_model import KVModel
from kvrag_bench.judge.judging import prompts_that_fit
from kvrag_bench.quality import ways
from kvrag_bench.quality.datasets import load_questions
from kvrag_bench.quality.trial import Trial


@pytest.fixture(scope="module")
def trial() -> Trial:
    model = KVModel.load("kvrag-tiny")
    questions = load_questions("generated", num_questions=20)
    carried = next(one for one in questions if one.type == "carried_over")
    (asked,) = prompts_that_fit(model, [carried], 16, use_chat_template=True)
    with torch.no_grad():
        return Trial(model, asked)


@torch.no_grad()
def test_bounds_reach_full_prefill(trial: Trial) -> None:
    alone = trial.encoded_after(())
    everything = [trial.rows] * len(trial.layers)
    gap = trial.kl(trial.answered(alone))
    assert gap > 1e-3
    assert trial.kl(trial.replaced(alone, everything)) < 1e-6
    assert trial.kl(trial.recomputed(alone, everything)) < 1e-6
    assert trial.kl(trial.continued(alone, (), trial.rows, 0)) < 1e-6
    assert trial.kl(trial.replaced(alone, everything, "k")) > 1e-6
    # Computed again from a later layer on, they keep what they were encoded with below it.
    assert trial.kl(trial.continued(alone, (), trial.rows, 2)) > 1e-6
    half = trial.rows[::2]
    repaired = trial.recomputed(alone, [half] * len(trial.layers))
    assert trial.kl(trial.spread(alone, repaired[0], half)) != trial.kl(repaired)


@torch.no_grad()
def test_chunks_are_encoded_after_texts_of_their_own(trial: Trial) -> None:
    context = tuple(trial.token_ids(trial.chunks[0]))
    same = trial.each_encoded_after([context] * len(trial.chunks))
    together = trial.encoded_after(context)
    for kv, expected in zip(same.keys + same.values, together.keys + together.values, strict=True):
        torch.testing.assert_close(kv[:, :, trial.rows], expected[:, :, trial.rows])
    there_and_back = trial.with_free(trial.free(together))
    assert trial.kl(trial.answered(there_and_back)) == pytest.approx(
        trial.kl(trial.answered(together)), abs=1e-4
    )


@pytest.mark.slow
def test_a_run_continues_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def few(trial: Trial, *_: object) -> list[object]:
        filled = trial.answered(trial.encoded_after(()))
        return [(ways.ALONE, filled), ("again", filled)]

    monkeypatch.setattr(ways, "ways", few)
    out = tmp_path / "trials.jsonl"
    given = ["--model", "kvrag-tiny", "--suite", "bridge", "--questions", "2", "--out", str(out)]
    monkeypatch.setattr("sys.argv", ["ways", *given])
    ways.main()
    first, second = out.read_text().splitlines()
    # Stopped in the middle of a line.
    out.write_text(f"{first}\n{second[:40]}")
    capsys.readouterr()
    ways.main()
    assert out.read_text().splitlines()[0] == first
    assert json.loads(out.read_text().splitlines()[1]).keys() == {"settings", "kl"}
    printed = capsys.readouterr().out
    assert "question 1 of 2" not in printed
    assert "question 2 of 2" in printed
    assert "2 questions" in printed

    for told, written in {
        "line 2: expected a trial": f"{first}\nno JSON\n",
        "line 1: expected a trial": first.replace('"seed": 7', '"seed": 8') + "\n",
    }.items():
        out.write_text(written)
        with pytest.raises(SystemExit):
            ways.main()
        assert told in capsys.readouterr().err
        assert out.read_text() == written


def test_wrong_options_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for told, given in {
        "no-such-model": ["--model", "no-such-model", "--out", str(tmp_path / "out")],
        "cannot be used": ["--model", "kvrag-tiny", "--out", str(tmp_path)],
        "expected at least 1": [
            "--model",
            "kvrag-tiny",
            "--questions",
            "0",
            "--out",
            str(tmp_path / "out"),
        ],
    }.items():
        monkeypatch.setattr("sys.argv", ["ways", *given])
        with pytest.raises(SystemExit):
            ways.main()
        assert told in capsys.readouterr().err


def test_depths_gather_most_relevance_for_their_price() -> None:
    relevance = torch.tensor([[1.0, 0.1, 3.0], [5.0, 0.1, 0.1], [0.1, 0.1, 0.1]])
    # Two layers of the first token gather 6, one layer of the third 3.
    assert ways.nested(relevance, 3).tolist() == [2, 0, 1]
    assert ways.nested(relevance, 9).sum() <= 9
    assert ways.nested(relevance, 0).tolist() == [0, 0, 0]
