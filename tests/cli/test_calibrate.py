import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from kvrag.cli.calibrate import _sentence
from kvrag.fusion.controller import Calibration, Measured
from tests.cli.conftest import Run

QUESTION = "Who keeps the harbour ledger?"
SMALL = ("--questions", 3, "--ratios", "0.1", "--policies", "none,query", "--max-tokens", "3")


def test_auto_follows_a_calibration(run: Run, index_folder: Path) -> None:
    asked = ("query", "-i", index_folder, QUESTION, "--policy", "auto", "--max-tokens", 2, "--json")
    before = run(*asked, code=1)
    assert "run 'kvrag calibrate'" in before.err

    done = run("calibrate", "-i", index_folder, *SMALL)
    assert "agreement over" in done.out
    last = " ".join(done.out.splitlines()[-3:])
    assert re.search(r"With '--policy auto', [\d.]+% of an answer's tokens differ", last), last
    assert re.search(r"(loses [\d.]+%, (about|at)|nothing that was measured loses less)", last)
    report = run(*asked).json["report"]
    assert report["policy"].partition("(")[0] in ("none", "query")
    assert 0.0 <= report["expected_loss"] <= 1.0
    assert "loading from file:" in done.out
    # Nothing where computing the chunks was measured to be quicker than loading them; on a busy
    # machine a price may come out as nothing too.
    assert report["expected_seconds"] >= report["expected_load_seconds"] >= 0.0
    bounded = run(*asked, "--ratio", "0").json["report"]
    assert bounded["policy"] == "none"
    assert bounded["num_recomputed"] == 0


@pytest.mark.parametrize(
    ("speed", "said"),
    [
        (3.21, "comes about 3.2 times sooner, for"),
        (1.04, "comes about as soon, for"),
        (0.5, "comes about 2.0 times later, for"),
        (2e5, "comes at a time that so few questions do not tell, for"),
        (0.0, "comes at a time that so few questions do not tell, for"),
    ],
)
def test_the_sentence_says_how_soon(speed: float, said: str) -> None:
    measured = Measured("query", 0.1, 0.02, 0.01, 0.03)
    assert said in _sentence([(measured, speed)], 5)
    assert f"query at 10% loses 2.0%, {said[6:-5]}." in _sentence(
        [(measured, 9.0), (measured, speed)], 5
    )


def test_what_loading_costs_holds_for_the_store_it_was_measured_at(
    run: Run, index_folder: Path
) -> None:
    done = run("calibrate", "-i", index_folder, *SMALL, "--store", "memory:")
    assert "loading: not measured" in done.out
    kept = run("calibrate", "-i", index_folder, *SMALL, "--json").json
    assert kept == json.loads((index_folder / "calibration.json").read_text())
    asked = ("query", "-i", index_folder, QUESTION, "--policy", "auto", "--max-tokens", 2, "--json")
    assert run(*asked).json["report"]["expected_load_seconds"] is not None
    elsewhere = run(*asked, "--store", "memory:").json["report"]
    assert elsewhere["expected_load_seconds"] is None


def test_what_cannot_be_calibrated_says_why(run: Run, index_folder: Path) -> None:
    auto = run("calibrate", "-i", index_folder, "--policies", "auto", code=1)
    assert "chooses among the others" in auto.err
    unknown = run("calibrate", "-i", index_folder, "--policies", "none,oracle", code=1)
    assert "oracle" in unknown.err
    run("calibrate", "-i", index_folder, "--ratios", "2", *SMALL[:2], code=1)


def test_a_calibration_of_another_model_is_refused(run: Run, index_folder: Path) -> None:
    run("calibrate", "-i", index_folder, *SMALL)
    path = index_folder / "calibration.json"
    found = Calibration.from_json(path.read_text(), "here")
    path.write_text(replace(found, model_fingerprint="0" + found.model_fingerprint).to_json())
    done = run("query", "-i", index_folder, QUESTION, "--policy", "auto", code=1)
    assert "another model" in done.err
    path.write_text("{")
    done = run("query", "-i", index_folder, QUESTION, "--policy", "auto", code=1)
    assert "run 'kvrag calibrate' again" in done.err


def test_what_cannot_be_kept_is_not_measured(
    run: Run, index_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvrag.tune import calibrate as module

    def measured(*_: object) -> None:
        raise AssertionError("was measured")

    monkeypatch.setattr(module, "calibrate", measured)
    (index_folder / "calibration.json").mkdir()
    done = run("calibrate", "-i", index_folder, *SMALL, code=1)
    assert "calibration.json" in done.err
    assert "directory" in done.err
