"""What `kvrag bench throughput` counts."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import pytest

from kvrag.errors import EngineError, ParameterError
from kvrag.server.app import ServerOptions
from kvrag_bench.serving.streams import StartedServer
from kvrag_bench.serving.throughput import (
    FULL,
    ThroughputOptions,
    _Asking,
    _round,
    _row,
    _Seen,
)
from tests.cli.conftest import Run, run
from tests.support.api_server import Served, serving
from tests.support.rag import PASSAGES, Rag, rag

__all__ = ["rag", "run"]

OPTIONS = ThroughputOptions("", num_requests=6, num_chunks=2, max_tokens=4)


@pytest.fixture(scope="module")
def served(rag: Rag) -> Iterator[Served]:
    with serving(rag.index, ServerOptions(max_streams=2, max_waiting=8)) as running:
        yield running


def asked(served: Served, way: str, options: ThroughputOptions = OPTIONS) -> _Seen:
    asking, seen = _Asking(served.engine.index, list(PASSAGES), options), _Seen()
    asyncio.run(_round(StartedServer(served.url, os.getpid()), way, 3, asking, seen))
    return seen


def test_answers_of_each_way(served: Served) -> None:
    reused, full = (asked(served, way) for way in ("kvrag", FULL))
    for seen in (reused, full):
        assert len(seen.ttft) == len(seen.prompt) == 6
        assert seen.num_failed == 0
        assert max(seen.answer) <= 4 < min(seen.prompt)
    row = _row("kvrag", 3, reused, 7.0)
    assert row.of_full == row.requests_per_minute / 7.0 > 0
    assert 0 < row.ttft_p50_seconds <= row.ttft_p95_seconds
    assert row.processor_ms > 0 < row.megabytes


def test_questions_are_never_asked_twice(served: Served) -> None:
    asking = _Asking(served.engine.index, ["Who?"], OPTIONS)
    bodies = [asking.next(way) for way in ("kvrag", FULL, "llama.cpp", "kvrag")]
    said = [body["messages"][0]["content"] for body in bodies]
    assert len(set(said)) == 4
    assert [one.get("kvrag") for one in bodies] == [
        {"k": 2},
        {"reuse": False, "k": 2},
        None,
        {"k": 2},
    ]
    # llama.cpp searches nothing itself.
    assert any(text in said[2] for text in PASSAGES.values())


def test_failed_requests(served: Served) -> None:
    seen = asked(served, "kvrag", ThroughputOptions("", num_requests=3, num_chunks=10**6))
    assert (seen.ttft, seen.num_failed) == ([], 3)
    with pytest.raises(EngineError, match="none of 3 requests"):
        _row("kvrag", 1, seen, None)


def test_an_unknown_way() -> None:
    with pytest.raises(ParameterError, match="way 'none': expected kvrag, kvrag none"):
        ThroughputOptions("", ways=("none",))


@pytest.mark.slow
def test_the_command(run: Run) -> None:
    ways = ("--ways", "kvrag,full prefill", "--clients", "2", "--requests", "2", "--rounds", "1")
    done = run("bench", "throughput", "--model", "kvrag-tiny", *ways, "--json")
    assert done.code == 0, done.err
    assert [row["way"] for row in done.json] == ["kvrag", FULL]
    assert done.json[1]["of_full"] == 1.0
