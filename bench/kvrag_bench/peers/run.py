"""`kvrag bench peers`: runs each tool in a separate process, and compares what they report."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from kvrag.models.loading import load_tokenizer
from kvrag_bench.peers.options import PeersOptions
from kvrag_bench.peers.systems import PEERS
from kvrag_bench.peers.workload import VISITS, handbook_chunks, make_prompts

_BASELINE = "transformers"


@dataclass(frozen=True)
class PeerRow:
    """One tool.

    Attributes
    ----------
    name, version, settings
        What ran.
    ttft_seconds
        Median time to the first token, by visit.
    speedup
        How many times sooner than Transformers in this run, by visit; None without it.
    full_seconds
        Median time to the first token by its own full prefill.
    tokens_per_second
        While the answer is written, after the first token: the median; None for answers of one
        token.
    peak_bytes
        Rise of resident memory from before the tool was loaded.
    agreement
        How much of its answers equals what the tool itself writes after full prefill: the mean
        length of the common beginning, in characters, over the longer of both.
    failure
        Why it could not be measured, or "".
    """

    name: str
    version: str
    settings: str
    ttft_seconds: dict[str, float]
    speedup: dict[str, float] | None
    full_seconds: float
    tokens_per_second: float | None
    peak_bytes: int
    agreement: float
    failure: str = ""


def run_peers_bench(
    options: PeersOptions, on_progress: Callable[[str], None] = lambda _: None
) -> list[PeerRow]:
    """Measure each installed tool in turn, and return their rows.

    Raises
    ------
    ParameterError, ModelLoadError
        Before anything is measured: when the handbook has too few chunks, or there is no such
        model.
    """
    list(make_prompts(handbook_chunks(), options.num_chunks, options.num_sets, options.seed))
    load_tokenizer(options.model)
    found: dict[str, dict[str, Any]] = {}
    for name in options.peers:
        if not PEERS[name].version:
            on_progress(f"{name} is not installed")
            continue
        on_progress(name)
        found[name] = _in_a_process(name, options)
    baseline = found.get(_BASELINE, {}).get("answers")
    return [_row(name, result, baseline) for name, result in found.items()]


def _in_a_process(name: str, options: PeersOptions) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="kvrag-peers-") as folder:
        asked, answered = Path(folder) / "job.json", Path(folder) / "result.json"
        asked.write_text(json.dumps({"peer": name, "options": asdict(options)}))
        command = [sys.executable, "-m", "kvrag_bench.peers.worker", str(asked), str(answered)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=options.timeout_seconds
            )
        except subprocess.TimeoutExpired:
            return {"failure": f"not done after {options.timeout_seconds:.0f} s"}
        if done.returncode or not answered.exists():
            said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            return {"failure": said[-1]}
        result: dict[str, Any] = json.loads(answered.read_text())
        return result


def _row(name: str, result: dict[str, Any], baseline: Sequence[dict[str, Any]] | None) -> PeerRow:
    if "failure" in result:
        return PeerRow(
            name, PEERS[name].version, "", {}, None, 0.0, None, 0, 0.0, result["failure"]
        )
    answers = result["answers"]
    ttft = _by_visit(answers)
    plain = None if baseline is None else _by_visit(baseline)
    seconds = [one["seconds_per_token"] for one in answers if one["seconds_per_token"]]
    return PeerRow(
        name=name,
        version=result["version"],
        settings=result["settings"],
        ttft_seconds=ttft,
        speedup=None if plain is None else {visit: plain[visit] / ttft[visit] for visit in ttft},
        full_seconds=median(one["full_seconds"] for one in answers),
        tokens_per_second=1 / median(seconds) if seconds else None,
        peak_bytes=result["peak_bytes"],
        agreement=fmean(_agreement(one["text"], one["full_text"]) for one in answers),
    )


def _by_visit(answers: Sequence[dict[str, Any]]) -> dict[str, float]:
    return {
        visit: median(one["ttft_seconds"] for one in answers if one["visit"] == visit)
        for visit in VISITS
    }


def _agreement(text: str, full: str) -> float:
    longer = max(len(text), len(full))
    differ = (one != other for one, other in zip(text, full, strict=False))
    common = next((place for place, is_other in enumerate(differ) if is_other), None)
    return (min(len(text), len(full)) if common is None else common) / longer if longer else 1.0
