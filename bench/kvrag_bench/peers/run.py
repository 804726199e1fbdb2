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

import torch

from kvrag.errors import ParameterError
from kvrag_bench.peers.systems import PEERS
from kvrag_bench.peers.worker import Job
from kvrag_bench.peers.workload import VISITS

_BASELINE = "transformers"


@dataclass(frozen=True)
class PeersOptions:
    """What to measure.

    Attributes
    ----------
    model
        A name of `kvrag models`.
    peers
        Names in `PEERS`; those that are not installed are left out.
    num_chunks
        Chunks of up to 230 tokens in each prompt.
    num_sets
        Sets of chunks, each asked about three times.
    max_tokens
        Length of an answer.
    seed
        Of the choice and the order of chunks.
    timeout_seconds
        For one tool.
    """

    model: str = "smollm2-135m"
    peers: tuple[str, ...] = tuple(PEERS)
    num_chunks: int = 8
    num_sets: int = 3
    max_tokens: int = 24
    seed: int = 0
    timeout_seconds: float = 1800.0

    def __post_init__(self) -> None:
        if min(self.num_chunks, self.num_sets, self.max_tokens) < 1:
            raise ParameterError("bench peers: chunks, sets and tokens must be 1 or more")
        if unknown := [name for name in self.peers if name not in PEERS]:
            raise ParameterError(
                f"bench peers: no tool {unknown[0]!r}; expected some of: {', '.join(PEERS)}"
            )


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
    tokens_per_second
        While the answer is written, after the first token: the median.
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
    tokens_per_second: float
    peak_bytes: int
    agreement: float
    failure: str = ""


def run_peers_bench(
    options: PeersOptions, on_progress: Callable[[str], None] = lambda _: None
) -> list[PeerRow]:
    """Measure each installed tool in turn, and return their rows."""
    found: dict[str, dict[str, Any]] = {}
    for name in options.peers:
        if not PEERS[name].version:
            on_progress(f"{name} is not installed")
            continue
        on_progress(name)
        found[name] = _in_a_process(name, options)
    baseline = found.get(_BASELINE, {}).get("answers")
    return [_row(name, result, baseline) for name, result in found.items()]


def num_threads() -> int:
    """Return how many threads each tool may use: PyTorch's number."""
    return torch.get_num_threads()


def _in_a_process(name: str, options: PeersOptions) -> dict[str, Any]:
    job = Job(
        peer=name,
        model=options.model,
        num_chunks=options.num_chunks,
        num_sets=options.num_sets,
        max_tokens=options.max_tokens,
        seed=options.seed,
    )
    with tempfile.TemporaryDirectory(prefix="kvrag-peers-") as folder:
        asked, answered = Path(folder) / "job.json", Path(folder) / "result.json"
        asked.write_text(json.dumps(asdict(job)))
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
        return PeerRow(name, PEERS[name].version, "", {}, None, 0.0, 0, 0.0, result["failure"])
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
        tokens_per_second=1 / median(seconds) if seconds else 0.0,
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
    if not longer:
        return 1.0
    return _common(text, full) / longer


def _common(text: str, full: str) -> int:
    for number, (one, other) in enumerate(zip(text, full, strict=False)):
        if one != other:
            return number
    return min(len(text), len(full))
