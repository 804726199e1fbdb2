"""One tool's part of `kvrag bench peers`, in a separate process: a job in, results out."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvrag.errors import KVRagError
from kvrag_bench.memory import peak_bytes
from kvrag_bench.peers.options import PeersOptions
from kvrag_bench.peers.systems import PEERS, System
from kvrag_bench.peers.workload import Prompt, handbook_chunks, make_prompts


def measure(peer: str, options: PeersOptions) -> dict[str, Any]:
    """Return a tool's answers, with and without reuse, and what it took."""
    documents = handbook_chunks()
    prompts = list(make_prompts(documents, options.num_chunks, options.num_sets, options.seed))
    short = Prompt("", (documents[0][:400],), prompts[0].question)
    systems: list[System] = []
    answers: list[dict[str, Any]] = []

    def work() -> None:
        system = PEERS[peer].make(options.model)
        systems.append(system)
        # What only a process's first answer pays does not count.
        system.answer(short, 2, reuse=False)
        system.prepare(documents)
        answers.extend(_asked(system, prompts, options.max_tokens))

    rise = peak_bytes(work)
    (system,) = systems
    # After everything timed, as it may fill a cache.
    for prompt, found in zip(prompts, answers, strict=True):
        full = system.answer(prompt, options.max_tokens, reuse=False)
        found |= {"full_text": full.text, "full_seconds": full.ttft_seconds}
    return {
        "settings": system.settings,
        "version": PEERS[peer].version,
        "peak_bytes": rise,
        "answers": answers,
    }


def _asked(system: System, prompts: list[Prompt], max_tokens: int) -> list[dict[str, Any]]:
    return [
        {"visit": prompt.visit, **asdict(system.answer(prompt, max_tokens, reuse=True))}
        for prompt in prompts
    ]


if __name__ == "__main__":
    job_path, result_path = map(Path, sys.argv[1:])
    job = json.loads(job_path.read_text())
    try:
        result = measure(job["peer"], PeersOptions(**job["options"]))
    except KVRagError as error:
        result = {"failure": str(error)}
    result_path.write_text(json.dumps(result))
