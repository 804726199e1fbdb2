from __future__ import annotations

import pytest

from tests.cli.conftest import Run

SMALL = (
    *("bench", "load", "--random-shape", "test", "--chunks", "2", "--chunk-tokens", "20"),
    *("--question-tokens", "5", "--speeds", "1", "--ratios", "0.5", "--repeats", "1"),
)


def test_table_for_a_person(run: Run) -> None:
    done = run(*SMALL)
    assert done.code == 0, done.err
    assert "deviation 50%" in done.out
    assert "one by one" in done.out
    assert "boundary 50%" in done.out


def test_one_part_and_an_unknown_one(run: Run) -> None:
    done = run(*SMALL, "--parts", "controller", "--policy", "deviation", "--json")
    assert done.code == 0, done.err
    assert list(done.json) == ["controller"]
    assert done.json["controller"][0]["policy"] == "deviation"
    # What the controller could not choose is no matter where it is not asked for.
    done = run(*SMALL, "--parts", "pipelining", "--policy", "none", "--json")
    assert done.code == 0, done.err
    assert done.json["pipelining"][0]["ratio"] is None
    assert "--parts 'tiers'" in run(*SMALL, "--parts", "tiers").err


@pytest.mark.parametrize("speeds", ["", "0", "-1", "inf", "fast"])
def test_wrong_speeds(run: Run, speeds: str) -> None:
    done = run("bench", "load", "--speeds", speeds)
    assert done.code != 0
    assert "--speeds" in done.err
