"""The gap closed over the questions of several runs."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from kvrag_bench.judge.judgements import Contestant
from kvrag_bench.quality.together import PLAIN_REUSE, close_together, main

FILLED = Contestant("none", None, context="filler:512")
CHOSEN = Contestant("two_stage", 0.15, context="filler:512")


def write(path: Path, *judged: tuple[Contestant, str, list[float]]) -> Path:
    lines = [
        json.dumps({"contestant": asdict(one), "question": question, "judgement": {"kl": kl}})
        for one, question, kl in judged
    ]
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def test_questions_of_all_files_count_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = write(
        tmp_path / "a.jsonl",
        (PLAIN_REUSE, "question 0", [1.0, 3.0]),
        (FILLED, "question 0", [1.0]),
        (CHOSEN, "question 0", [0.5]),
    )
    second = write(
        tmp_path / "b.jsonl", (PLAIN_REUSE, "question 0", [6.0]), (FILLED, "question 0", [1.0])
    )
    plain, filled = close_together([first, second])
    assert (plain.contestant, plain.gap_closed, plain.num_questions) == (PLAIN_REUSE, 0, 2)
    assert (filled.contestant, filled.kl) == (FILLED, 1.0)
    assert filled.gap_closed == pytest.approx(1 - 2 / 8)
    assert filled.low <= filled.gap_closed <= filled.high
    main([str(first), str(second)])
    assert "75%" in capsys.readouterr().out
