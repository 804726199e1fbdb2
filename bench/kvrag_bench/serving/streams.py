"""Many streams of `kvrag serve` at once: how long each waits, and whether any is lost or mixed up.

The server runs in a separate process, as users start it. Each client asks, reads its stream to the
end, and asks something else. Every answer is compared with the engine's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvrag.chunk import Document
from kvrag.engine.engine import KVEngine
from kvrag.errors import EngineError
from kvrag.ingest.index import Index
from kvrag.plugins import require
from kvrag_corpus import generate_corpus

_ALONE_SHARE = 0.1
# For one stream, its wait included.
_TIMEOUT_SECONDS = 300.0


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


@dataclass
class _Seen:
    ttft: list[float] = field(default_factory=list)
    total: list[float] = field(default_factory=list)
    num_pieces: int = 0
    num_streams: int = 0
    num_lost: int = 0
    num_mixed: int = 0


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
    require("aiohttp", "serve")
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
                seen = asyncio.run(
                    _ask_all(
                        server.url, asked, num_clients, share * options.seconds, options.max_tokens
                    )
                )
                rows.append(_row(seen, num_clients))
    return rows


def _prompt(index: Index, question: str, num_chunks: int) -> str:
    texts = [hit.chunk.text for hit in index.search(question, num_chunks)]
    return "\n\n".join([*texts, f"Question: {question}\nAnswer:"])


@dataclass(frozen=True)
class StartedServer:
    """A server in another process: the address of its API, and the process."""

    url: str
    pid: int


@contextlib.contextmanager
def serving_index(index: Path, *options: str) -> Iterator[StartedServer]:
    """Yield `kvrag serve` with these options."""
    words = ("-m", "kvrag", "serve", "--index", str(index), "--port", "0", *options)
    with started(*words) as server:
        yield server


@contextlib.contextmanager
def started(*words: str) -> Iterator[StartedServer]:
    """Yield the server that Python starts by these words, and that prints its address."""
    environment = {name: one for name, one in os.environ.items() if name != "KVRAG_SERVER_KEY"}
    with subprocess.Popen(
        [sys.executable, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    ) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            if not url:
                command = " ".join(words[:3])
                raise EngineError(f"the server did not start; run 'python {command}' to see why")
            yield StartedServer(url, process.pid)
        finally:
            process.terminate()


async def _ask_all(
    url: str, asked: dict[str, str], num_clients: int, seconds: float, max_tokens: int
) -> _Seen:
    """Let clients ask until the time is over; streams that have begun are read to their end."""
    import aiohttp

    seen = _Seen()
    numbered = itertools.cycle(asked.items())
    ends = time.perf_counter() + seconds
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=_TIMEOUT_SECONDS),
    ) as session:

        async def client() -> None:
            while time.perf_counter() < ends:
                prompt, expected = next(numbered)
                body = {
                    **{"model": model, "prompt": prompt, "max_tokens": max_tokens},
                    **{"stream": True},
                }
                await _ask(session, f"{url}/completions", body, expected, seen)

        async with session.get(f"{url}/models") as response:
            model = (await response.json())["data"][0]["id"]
        await asyncio.gather(*(client() for _ in range(num_clients)))
    return seen


async def _ask(session: Any, url: str, body: dict[str, Any], expected: str, seen: _Seen) -> None:
    import aiohttp

    seen.num_streams += 1
    started = time.perf_counter()
    text, ttft, has_ended = "", None, False
    try:
        async with session.post(url, json=body) as response:
            async for line in response.content:
                if line == b"data: [DONE]\n":
                    has_ended = True
                elif line.startswith(b"data: "):
                    piece = json.loads(line[6:])["choices"][0]["text"]
                    if piece and ttft is None:
                        ttft = time.perf_counter() - started
                    text += piece
                    seen.num_pieces += 1
    except (aiohttp.ClientError, TimeoutError, KeyError, ValueError):
        has_ended = False
    if not has_ended:
        seen.num_lost += 1
        return
    seen.num_mixed += text != expected
    seen.total.append(time.perf_counter() - started)
    # An answer may be empty.
    seen.ttft.append(seen.total[-1] if ttft is None else ttft)


def _row(seen: _Seen, num_clients: int) -> StreamsRow:
    def quantiles(seconds: list[float]) -> list[float]:
        return [float(one) for one in np.quantile(seconds or [float("nan")], (0.5, 0.95))]

    ttft, total = quantiles(seen.ttft), quantiles(seen.total)
    return StreamsRow(
        num_clients=num_clients,
        num_streams=seen.num_streams,
        num_lost=seen.num_lost,
        num_mixed=seen.num_mixed,
        ttft_p50_seconds=ttft[0],
        ttft_p95_seconds=ttft[1],
        total_p50_seconds=total[0],
        total_p95_seconds=total[1],
        pieces_per_second=num_clients * seen.num_pieces / sum(seen.total) if seen.total else 0.0,
    )
