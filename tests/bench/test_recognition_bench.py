from pathlib import Path

import pytest

from kvrag.errors import ParameterError
from kvrag_bench.quality.handbook import handbook_pages
from kvrag_bench.recognition.reuse import measure_reuse
from kvrag_bench.recognition.splitters import ALTERED


def test_text_cut_by_other_splitters_is_reused(tmp_path: Path) -> None:
    rows = list(measure_reuse(tmp_path, "kvrag-tiny", handbook_pages()[:2], 160, lambda _: None))
    assert len(rows) == 9 + len(ALTERED)
    for row in rows[:9]:
        assert row.runs > 0.85
        assert row.runs >= row.whole
    altered = {row.name: row for row in rows[9:]}
    assert set(altered) == set(ALTERED)
    assert all(row.whole < 0.6 < row.runs for name, row in altered.items() if "line" in name)
    with pytest.raises(ParameterError, match="no documents"):
        next(measure_reuse(tmp_path, "kvrag-tiny", [], 160, lambda _: None))
