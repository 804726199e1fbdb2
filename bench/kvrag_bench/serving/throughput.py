"""Many clients, other questions, the same documents: `kvrag serve` with and without reuse.

Each way answers its questions in turn with the others, so a busy machine slows them all. No prompt
is asked twice: only the documents in it were there before.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from kvrag.engine.asking import Asking
from kvrag.errors import EngineError, ParameterError
from kvrag.ingest.index import Index
from kvrag.plugins import require
from kvrag_bench.corpora import read_handbook
from kvrag_bench.serving.clients import StartedServer, Told, ask_all, serving_index, started

FULL, LLAMA_CPP, BESIDE = "full prefill", "llama.cpp", "beside"
WAYS: dict[str, dict[str, Any]] = {
    "kvrag": {},
    "kvrag none": {"policy": "none"},
    FULL: {"reuse": False},
}
"""What `kvrag serve` is asked for, by the name of the way."""


@dataclass(frozen=True)
class ThroughputOptions:
    """What to measure.

    Attributes
    ----------
    model
        The model.
    ways
        Names of `WAYS`; `LLAMA_CPP` and `BESIDE` answer the same prompts from their own servers.
    clients
        Numbers of clients, each of which asks again as soon as its answer has ended.
    num_requests, num_rounds
        Requests of each round, and rounds of each way and number of clients.
    num_chunks, max_tokens
        Chunks in a prompt, and most tokens of an answer.
    serve
        Further options of `kvrag serve`.
    beside
        The address of another server of OpenAI's API, such as ``http://127.0.0.1:8000/v1``, that
        runs already and has the same model: the way `BESIDE`.
    processor_time
        Whether all times are processor time of the server, whatever else the machine does.
    """

    model: str
    ways: tuple[str, ...] = (*WAYS, LLAMA_CPP)
    clients: tuple[int, ...] = (8, 32)
    num_requests: int = 32
    num_rounds: int = 2
    num_chunks: int = 4
    max_tokens: int = 32
    serve: tuple[str, ...] = ()
    beside: str | None = None
    processor_time: bool = False

    def __post_init__(self) -> None:
        known = (*WAYS, LLAMA_CPP, *([BESIDE] if self.beside else []))
        if unknown := [one for one in self.ways if one not in known]:
            raise ParameterError(f"way {unknown[0]!r}: expected {', '.join(known)}")
        if self.beside and self.processor_time:
            raise ParameterError("processor time of a server that runs already is not known")


@dataclass(frozen=True)
class ThroughputRow:
    """What clients saw of one way.

    Attributes
    ----------
    way, num_clients
        What was measured.
    num_answers, num_failed
        Answers, and requests without one.
    prompt_tokens, answer_tokens
        Means of the answers.
    requests_per_minute, of_full
        And how many times those of full prefill with as many clients; None without.
    ttft_p50_seconds, ttft_p95_seconds
        Time to the first text, the wait included.
    processor_ms
        Processor time of the server for each answer; None for a server that ran already.
    megabytes
        Memory of the server after each round; none for a server that ran already.
    """

    way: str
    num_clients: int
    num_answers: int
    num_failed: int
    prompt_tokens: float
    answer_tokens: float
    requests_per_minute: float
    of_full: float | None
    ttft_p50_seconds: float
    ttft_p95_seconds: float
    processor_ms: float | None
    megabytes: list[float]


@dataclass
class _Seen:
    told: list[Told] = field(default_factory=list)
    num_failed: int = 0
    seconds: float = 0.0
    processor: float = 0.0
    megabytes: list[float] = field(default_factory=list)


def measure_throughput(
    options: ThroughputOptions, say: Callable[[str], None] = lambda _: None
) -> list[ThroughputRow]:
    """Measure each way with each number of clients.

    Raises
    ------
    ParameterError
        When the extra ``serve`` or the package of llama.cpp is not installed.
    EngineError
        When a server does not start.
    """
    require("fastapi", "serve")
    if not Path("/proc/self/statm").exists():
        raise ParameterError("processor time of a server is known on Linux alone")
    most = max(options.clients)
    limits = ["--streams", str(most), "--waiting", str(most), *options.serve]
    seen: dict[tuple[int, str], _Seen] = {}
    with tempfile.TemporaryDirectory(prefix="kvrag-bench-") as folder:
        say("indexing")
        path = Path(folder) / "index"
        documents, cases = read_handbook()
        with Index.create(path, model=options.model) as index:
            index.add(documents)
            index.on_demand.make_all()
            asking = _Asking(index, [case.question for case in cases], options)
            with _serving(path, limits, options) as servers:
                asyncio.run(_warm_up(servers, asking, options))
                for clients in options.clients:
                    for number in range(options.num_rounds):
                        for way in options.ways[:: 1 if number % 2 == 0 else -1]:
                            say(f"{way}, {clients} clients, round {number + 1}")
                            into = seen.setdefault((clients, way), _Seen())
                            asyncio.run(_round(servers[way], way, clients, asking, into))
    full = {clients: _rate(one) for (clients, way), one in seen.items() if way == FULL}
    return [_row(way, clients, one, full.get(clients)) for (clients, way), one in seen.items()]


class _Asking:
    """Makes requests that nobody has made before."""

    def __init__(self, index: Index, questions: list[str], options: ThroughputOptions) -> None:
        self._index, self._questions, self.options = index, questions, options
        self._num_asked = 0

    def next(self, way: str, max_tokens: int | None = None) -> dict[str, Any]:
        """Return the body of a request."""
        options, number = self.options, self._num_asked
        self._num_asked += 1
        question = f"{self._questions[number % len(self._questions)]} (case {number})"
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": question}],
            "max_tokens": max_tokens or options.max_tokens,
            "temperature": 0,
        }
        if way in WAYS:
            return body | {"kvrag": WAYS[way] | {"k": options.num_chunks}}
        hits = self._index.search(question, options.num_chunks)
        content = Asking().message(question, [hit.chunk.text for hit in hits])
        return body | {"messages": [{"role": "user", "content": content}]}


@contextlib.contextmanager
def _serving(
    path: Path, limits: list[str], options: ThroughputOptions
) -> Iterator[dict[str, StartedServer]]:
    """Yield the server of each way, in separate processes."""
    theirs = ("-m", "kvrag_bench.serving.llamacpp", options.model, str(max(options.clients)))
    with contextlib.ExitStack() as stack:
        servers: dict[str, StartedServer] = {}
        if any(way in WAYS for way in options.ways):
            servers |= dict.fromkeys(WAYS, stack.enter_context(serving_index(path, *limits)))
        if LLAMA_CPP in options.ways:
            servers[LLAMA_CPP] = stack.enter_context(started(*theirs))
        if options.beside:
            servers[BESIDE] = StartedServer(options.beside, pid=None)
        yield servers


def _processor_seconds(server: StartedServer) -> float:
    if server.pid is None:
        return float("nan")
    fields = Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _megabytes(server: StartedServer) -> float:
    pages = int(Path(f"/proc/{server.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


async def _warm_up(
    servers: dict[str, StartedServer], asking: _Asking, options: ThroughputOptions
) -> None:
    """Ask each way twice: the first answers pack weights, and measure what computing costs."""
    for way in options.ways:
        for _ in range(2):
            await ask_all(servers[way].url, [asking.next(way, 2)], 1, of_index=way in WAYS)


async def _round(
    server: StartedServer, way: str, clients: int, asking: _Asking, into: _Seen
) -> None:
    options = asking.options
    bodies = [asking.next(way) for _ in range(max(clients, options.num_requests))]
    used = partial(_processor_seconds, server)
    clock = used if options.processor_time else time.perf_counter
    processor, begun = used(), clock()
    for told in await ask_all(server.url, bodies, clients, of_index=way in WAYS, clock=clock):
        into.num_failed += told is None
        into.told += [] if told is None else [told]
    into.seconds += clock() - begun
    into.processor += used() - processor
    if server.pid is not None:
        into.megabytes.append(_megabytes(server))


def _rate(seen: _Seen) -> float:
    return 60.0 * len(seen.told) / seen.seconds


def _row(way: str, clients: int, seen: _Seen, full: float | None) -> ThroughputRow:
    if not seen.told:
        raise EngineError(f"{way}: none of {seen.num_failed} requests was answered")
    ttft = [one.ttft for one in seen.told]
    return ThroughputRow(
        way=way,
        num_clients=clients,
        num_answers=len(ttft),
        num_failed=seen.num_failed,
        prompt_tokens=float(np.mean([one.usage["prompt_tokens"] for one in seen.told])),
        answer_tokens=float(np.mean([one.usage["completion_tokens"] for one in seen.told])),
        requests_per_minute=_rate(seen),
        of_full=_rate(seen) / full if full else None,
        ttft_p50_seconds=median(ttft),
        ttft_p95_seconds=float(np.quantile(ttft, 0.95)),
        processor_ms=1e3 * seen.processor / len(ttft) if seen.megabytes else None,
        megabytes=seen.megabytes,
    )
