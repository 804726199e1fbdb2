"""The bench of a server among clients that hold connections."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrag_bench.store import drip


@pytest.mark.slow
def test_a_small_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = drip._cases

    def one(token: str) -> list[drip._Case]:
        return [case for case in cases(token) if case.name == "drip with the token, same address"]

    monkeypatch.setattr(drip, "_cases", one)
    monkeypatch.setattr(drip, "SPELL_SECONDS", 0.1)
    said: list[str] = []
    (row,) = drip.measure_drip(tmp_path, 20, 2, said.append)
    assert said == [row.case]
    assert row.num_clients == 20
    assert row.num_failed == 0
    assert row.quiet_requests_per_second > 0
    assert row.share == pytest.approx(
        row.requests_per_second / row.quiet_requests_per_second, rel=5
    )
