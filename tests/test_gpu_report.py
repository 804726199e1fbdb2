"""The report of a graphics card: every stage leaves a line, whatever becomes of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools import gpu_stage

ROOT = Path(gpu_stage.__file__).parents[1]
_SLOW = """
import json, signal, sys, time
{prepare}
print("working", file=sys.stderr, flush=True)
try:
    time.sleep(60)
except KeyboardInterrupt:
    print(json.dumps([1, 2]))
"""
IGNORES = "signal.signal(signal.SIGINT, signal.SIG_IGN); print('half', flush=True)"


@pytest.mark.parametrize(
    ("code", "status", "is_cut", "found"),
    [
        ("print('{\"a\": 1}')", 0, False, {"a": 1}),
        ("print('no card'); exit(3)", 3, False, "no card\n"),
        ("raise ValueError", 1, False, ""),
        (_SLOW.format(prepare=""), 0, True, [1, 2]),
        (_SLOW.format(prepare=IGNORES), -9, True, "half\n"),
    ],
)
def test_a_stage_tells_what_it_has(code: str, status: int, is_cut: bool, found: Any) -> None:
    line = gpu_stage.run("one", 3.0 if is_cut else 60.0, [sys.executable, "-c", code])
    assert json.loads(json.dumps(line)) == line
    assert (line["stage"], line["exit"], line["found"]) == ("one", status, found)
    assert line.get("cut", False) is is_cut
    assert line.get("said", "").startswith("working") is is_cut


def test_without_time_all_stages_are_named(tmp_path: Path) -> None:
    given = {"PYTHON": sys.executable, "DEVICE": "cpu", "SECONDS_AT_MOST": "1"}
    subprocess.run(
        ["bash", ROOT / "tools" / "gpu_report.sh", tmp_path], env=os.environ | given, check=True
    )
    lines = [json.loads(line) for line in (tmp_path / "report.jsonl").read_text().splitlines()]
    names = [line["stage"] for line in lines]
    assert names[:2] == ["rates", "kernels"]
    assert {"ttft-8b-5k", "batch-8b", "decode-graphs-off"} <= {*names}
    assert len({*names}) == len(names)
    assert all(line["exit"] is None for line in lines)
