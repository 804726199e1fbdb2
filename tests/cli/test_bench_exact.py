from __future__ import annotations

from dataclasses import replace

import pytest

from kvrag_bench.exact import ExactRow
from tests.cli.conftest import Run


def test_the_command_fails_where_something_differs(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = ExactRow("m", "float32", 9, "x, ratio 1.0", "y", 0, 0, 9, 1e-6, 1e-7, 4, 4, 1e-4)
    rows = [right, replace(right, by_deviation=0.5, num_equal=1)]
    monkeypatch.setattr("kvrag_bench.exact.run_exact_bench", lambda options, on_progress: rows[:1])
    done = run("bench", "exact", "--json")
    assert done.code == 0, done.err
    assert done.json[0]["by_deviation"] == 1e-6
    monkeypatch.setattr("kvrag_bench.exact.run_exact_bench", lambda options, on_progress: rows)
    done = run("bench", "exact")
    assert done.code == 1
    assert "1 of 4 answer tokens" in done.err
    assert "5.0e-01" in done.out
