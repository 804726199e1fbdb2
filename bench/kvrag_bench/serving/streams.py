"""Many streams of `kvrag serve` at once: how long each waits, and whether any is lost or mixed up.

The server runs in a separate process, as users start it. Each client asks, reads its stream to the
end, and asks something else. Every answer is compared with the engine's own.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvrag.chunk import Document
from kvrag.engine.engine import KVEngine
from kvrag.ingest.index import Index
from kvrag.plugins import require
from kvrag_bench.serving.clients import Told, ask_all, serving_index
from kvrag_corpus import generate_corpus

_ALONE_SHARE = 0.1


@dataclass(frozen=True)
class StreamsOptions:
    """What to measure.

    Attributes
    ----------
    model
        The model.
    num_clients
        Streams at the same time.
    seconds
        Time in which streams begin.
    max_streams
        Answers that the server generates at the same time.
    num_prompts, num_chunks, max_tokens
        Different prompts, chunks in each, and most tokens of an answer.
    """

    model: str
    num_clients: int
    seconds: float
    max_streams: int
    num_prompts: int
    num_chunks: int
    max_tokens: int


@dataclass(frozen=True)
class StreamsRow:
    """What clients saw.

    Attributes
    ----------
    num_clients
        Streams at the same time.
    num_streams, num_lost, num_mixed
        Streams that were begun; those that ended without their end; those whose text is not the
        engine's.
    ttft_p50_seconds, ttft_p95_seconds
        Time to the first text, the wait included.
    total_p50_seconds, total_p95_seconds
        Time to the end.
    pieces_per_second
        Pieces of text of all streams together.
    """

    num_clients: int
    num_streams: int
    num_lost: int
    num_mixed: int
    ttft_p50_seconds: float
    ttft_p95_seconds: float
    total_p50_seconds: float
    total_p95_seconds: float
    pieces_per_second: float


def measure_streams(options: StreamsOptions, say: Callable[[str], None]) -> list[StreamsRow]:
    """Measure one client alone, then all of them.

    Raises
    ------
    ParameterError
        When the extra ``serve`` is not installed.
    EngineError
        When the server does not start.
    ModelLoadError, UnsupportedModelError
        When the model cannot be served.
    """
    require("fastapi", "serve")
    with tempfile.TemporaryDirectory(prefix="kvrag-bench-") as folder:
        say("indexing")
        path = Path(folder) / "index"
        corpus = generate_corpus(1, num_questions=options.num_prompts)
        with Index.create(path, model=options.model, embedding="hashing") as index:
            index.add([Document(one.document_id, one.text) for one in corpus.documents])
            prompts = [_prompt(index, one.question, options.num_chunks) for one in corpus.questions]
            say(f"{len(prompts)} answers of the engine")
            engine = KVEngine(index, max_tokens=options.max_tokens)
            asked = {prompt: engine.generate(prompt).text for prompt in prompts}
        rows = []
        limits = ["--streams", str(options.max_streams), "--waiting", str(options.num_clients)]
        # The clients ask few prompts, again and again.
        with serving_index(path, *limits, "--session-bytes", "0") as server:
            for num_clients, share in ((1, _ALONE_SHARE), (options.num_clients, 1.0)):
                say(f"{num_clients} streams at a time")
                seconds = share * options.seconds
                told = asyncio.run(
                    _ask_for(server.url, asked, num_clients, seconds, options.max_tokens)
                )
                rows.append(_row(told, asked, num_clients))
    return rows


def _prompt(index: Index, question: str, num_chunks: int) -> str:
    texts = [hit.chunk.text for hit in index.search(question, num_chunks)]
    return "\n\n".join([*texts, f"Question: {question}\nAnswer:"])


async def _ask_for(
    url: str, asked: Mapping[str, str], num_clients: int, seconds: float, max_tokens: int
) -> list[Told | None]:
    """Let clients ask until the time is over; streams that have begun are read to their end."""
    ends = time.perf_counter() + seconds
    bodies = itertools.cycle({"prompt": one, "max_tokens": max_tokens} for one in asked)
    in_time = itertools.takewhile(lambda _: time.perf_counter() < ends, bodies)
    return await ask_all(url, in_time, num_clients)


def _row(told: Sequence[Told | None], asked: Mapping[str, str], num_clients: int) -> StreamsRow:
    whole = [one for one in told if one is not None]

    def quantiles(seconds: list[float]) -> list[float]:
        return [float(one) for one in np.quantile(seconds or [float("nan")], (0.5, 0.95))]

    ttft, total = quantiles([one.ttft for one in whole]), quantiles([one.seconds for one in whole])
    num_pieces = sum(one.num_pieces for one in whole)
    return StreamsRow(
        num_clients=num_clients,
        num_streams=len(told),
        num_lost=len(told) - len(whole),
        num_mixed=sum(one.text != asked[one.body["prompt"]] for one in whole),
        ttft_p50_seconds=ttft[0],
        ttft_p95_seconds=ttft[1],
        total_p50_seconds=total[0],
        total_p95_seconds=total[1],
        pieces_per_second=num_clients * num_pieces / sum(one.seconds for one in whole)
        if whole
        else 0.0,
    )
