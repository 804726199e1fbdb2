"""`kvrag bench peers`: its exit code and its picture."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrag_bench.peers import run as measuring
from kvrag_bench.peers.workload import VISITS
from tests.cli.conftest import Run


@pytest.mark.parametrize("failure", ["", "it broke"])
def test_exit_code_and_picture(
    run: Run, failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = (
        {"failure": failure}
        if failure
        else {
            **{"settings": "s", "version": "1", "peak_bytes": 5},
            "answers": [
                {"visit": visit, "ttft_seconds": 1.0, "seconds_per_token": 0.0, "text": "a"}
                | {"full_text": "a"}
                for visit in VISITS
            ],
        }
    )
    monkeypatch.setattr(measuring, "_in_a_process", lambda *_: result)
    picture = tmp_path / "rows.png"
    asked = ("bench", "peers", "--model", "kvrag-tiny", "--peers", "transformers")
    done = run(*asked, "--picture", picture)
    assert done.code == int(bool(failure))
    assert picture.exists() is not bool(failure)
    assert run(*asked, "--json").code == int(bool(failure))
