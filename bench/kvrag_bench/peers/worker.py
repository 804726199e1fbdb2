"""One tool's part of `kvrag bench peers`, in a separate process: a job in, results out."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvrag.models.kv_model import KVModel
from kvrag_bench.memory import peak_bytes
from kvrag_bench.peers.systems import PEERS, System
from kvrag_bench.peers.workload import Prompt, handbook_chunks, make_prompts


@dataclass(frozen=True)
class Job:
    """What one process measures.

    Attributes
    ----------
    peer, model
        Names, in `PEERS` and of the model.
    num_chunks, num_sets, max_tokens, seed
        See `kvrag_bench.peers.run.PeersOptions`.
    """

    peer: str
    model: str
    num_chunks: int
    num_sets: int
    max_tokens: int
    seed: int


def measure(job: Job) -> dict[str, Any]:
    """Return a job's answers, with and without reuse, and what it took."""
    documents = handbook_chunks(KVModel.load(job.model))
    prompts = list(make_prompts(documents, job.num_chunks, job.num_sets, job.seed))
    systems: list[System] = []
    answers: list[dict[str, Any]] = []

    def work() -> None:
        system = PEERS[job.peer].make(job.model)
        systems.append(system)
        # What only a process's first answer pays does not count.
        system.answer(prompts[0].content[:400], 2, reuse=False)
        system.prepare(documents)
        answers.extend(_asked(system, prompts, job.max_tokens))

    rise = peak_bytes(work)
    (system,) = systems
    # After everything timed, as it may fill a cache.
    for prompt, found in zip(prompts, answers, strict=True):
        found["full_text"] = system.answer(prompt.content, job.max_tokens, reuse=False).text
    return {
        "settings": system.settings,
        "version": PEERS[job.peer].version,
        "peak_bytes": rise,
        "answers": answers,
    }


def _asked(system: System, prompts: list[Prompt], max_tokens: int) -> list[dict[str, Any]]:
    return [
        {"visit": prompt.visit, **asdict(system.answer(prompt.content, max_tokens, reuse=True))}
        for prompt in prompts
    ]


if __name__ == "__main__":
    job_path, result_path = map(Path, sys.argv[1:])
    result_path.write_text(json.dumps(measure(Job(**json.loads(job_path.read_text())))))
