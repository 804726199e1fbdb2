"""`kvrag bench vectors`: small numbers, with a small threshold, and a graph that is continued."""

from pathlib import Path

import pytest

from kvrag.ingest import cachefile
from kvrag_bench import vectors as bench


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cachefile, "GRAPH_FROM", 500)
    monkeypatch.setattr(bench, "GRAPH_FROM", 500)
    monkeypatch.setattr(bench, "_NUM_CHANGED", 100)
    monkeypatch.setattr(bench, "_BATCH", 1000)


def test_rows(tmp_path: Path) -> None:
    options = bench.VectorBenchOptions(3000, 16, 20, graph=str(tmp_path / "graph"))
    result = bench.run_vector_bench(options)
    assert [row.way for row in result.rows] == ["all", *["filtered"] * 3, "after changes"]
    assert [row.num_wanted for row in result.rows][::4] == [3000, 3000]
    assert 0.9 < min(row.recall for row in result.rows) <= 1
    assert result.memory_bytes > 3000 * 16 * 2
    assert result.build_seconds > 0
    again = bench.run_vector_bench(options)
    assert again.build_seconds != again.build_seconds  # it was made before
    assert [row.recall for row in again.rows][:4] == [row.recall for row in result.rows][:4]
