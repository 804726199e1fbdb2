"""The bench of what one request may cost others."""

import pytest

from kvrag_bench.serving import gaps

_SENT = ("nothing else", "a schema 400 deep")


@pytest.mark.slow
def test_a_stream_and_a_question_go_on_beside_a_refused_form(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gaps, "_SENT", {name: gaps._SENT[name] for name in _SENT})
    said: list[str] = []
    rows = gaps.measure_gaps("kvrag-tiny", 1.0, said.append)
    assert said == ["indexing", *_SENT]
    assert [(row.sent, row.answered) for row in rows] == [
        ("nothing else", "0 open"),
        ("a schema 400 deep", "400"),
    ]
    assert all(row.longest_gap_seconds > 0 < row.question_seconds for row in rows)
