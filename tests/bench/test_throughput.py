"""What `kvrag bench serve` and `kvrag bench throughput` count."""

import asyncio
import os
from collections.abc import Iterator
from dataclasses import replace

import httpx
import pytest

from kvrag.errors import EngineError, ParameterError
from kvrag.server.app import ServerOptions
from kvrag_bench.serving import throughput as t
from kvrag_bench.serving.clients import StartedServer
from kvrag_bench.serving.streams import StreamsRow, _ask_for
from kvrag_bench.serving.streams import _row as streams_row
from tests.cli.conftest import Run, run
from tests.support.api_server import Served, serving
from tests.support.rag import PASSAGES, Rag, rag

__all__ = ["rag", "run"]

OPTIONS = t.ThroughputOptions("", num_requests=6, num_chunks=2, max_tokens=4)


@pytest.fixture(scope="module")
def served(rag: Rag) -> Iterator[Served]:
    with serving(rag.index, ServerOptions(max_streams=2, max_waiting=8)) as running:
        yield running


def asked(served: Served, way: str, options: t.ThroughputOptions = OPTIONS) -> t._Seen:
    asking, seen = t._Asking(served.engine.index, list(PASSAGES), options), t._Seen()
    asyncio.run(t._round(StartedServer(served.url, os.getpid()), way, 3, asking, seen))
    return seen


def streamed(served: Served, answers: dict[str, str], seconds: float) -> StreamsRow:
    told = asyncio.run(_ask_for(served.url, answers, 2, seconds, 6))
    return streams_row(told, answers, 2)


def test_answers_of_each_way(served: Served) -> None:
    reused, full = (asked(served, way) for way in ("kvrag", t.FULL))
    for seen in (reused, full):
        assert (len(seen.told), seen.num_failed) == (6, 0)
        for one in seen.told:
            assert one.usage["completion_tokens"] <= 4 < one.usage["prompt_tokens"]
    row = t._row("kvrag", 3, reused, 7.0)
    assert row.of_full == row.requests_per_minute / 7.0 > 0
    assert 0 < row.ttft_p50_seconds <= row.ttft_p95_seconds
    assert row.processor_ms > 0 < row.megabytes[-1]
    timed = asked(served, "kvrag", replace(OPTIONS, processor_time=True))
    assert timed.seconds == pytest.approx(timed.processor, abs=0.1)
    assert all(0 <= one.ttft <= one.seconds <= timed.seconds for one in timed.told)


def test_a_server_that_runs_already(served: Served) -> None:
    options = replace(OPTIONS, ways=("kvrag", t.BESIDE), beside=served.url)
    asking, seen = t._Asking(served.engine.index, list(PASSAGES), options), t._Seen()
    asyncio.run(t._round(StartedServer(served.url, None), t.BESIDE, 3, asking, seen))
    row = t._row(t.BESIDE, 3, seen, 7.0)
    assert (row.num_answers, row.num_failed, row.processor_ms, row.megabytes) == (6, 0, None, [])
    assert row.requests_per_minute > 0
    # It searches nothing itself.
    assert all("kvrag" not in one.body for one in seen.told)
    with pytest.raises(ParameterError, match="processor time of a server that runs already"):
        replace(options, processor_time=True)
    with pytest.raises(ParameterError, match="way 'beside'"):
        replace(options, beside=None)
    with pytest.raises(ParameterError, match="way 'none': expected kvrag, kvrag none"):
        t.ThroughputOptions("", ways=("none",))


def test_questions_are_never_asked_twice(served: Served) -> None:
    asking = t._Asking(served.engine.index, ["Who?"], OPTIONS)
    bodies = [asking.next(way) for way in ("kvrag", t.FULL, "llama.cpp", "kvrag")]
    said = [body["messages"][0]["content"] for body in bodies]
    assert len(set(said)) == 4
    reuse = {"k": 2}
    assert [one.get("kvrag") for one in bodies] == [reuse, {"reuse": False, "k": 2}, None, reuse]
    # llama.cpp searches nothing itself.
    assert any(text in said[2] for text in PASSAGES.values())


def test_failed_requests(served: Served) -> None:
    seen = asked(served, "kvrag", t.ThroughputOptions("", num_requests=3, num_chunks=10**6))
    assert (seen.told, seen.num_failed) == ([], 3)
    with pytest.raises(EngineError, match="none of 3 requests"):
        t._row("kvrag", 1, seen, None)


def test_right_mixed_up_and_lost_streams(served: Served) -> None:
    prompts = list(PASSAGES.values())[:2]
    answers = {prompt: served.engine.generate(prompt, max_tokens=6).text for prompt in prompts}
    row = streamed(served, answers, 0.5)
    assert row.num_streams >= 2
    assert row.num_lost == row.num_mixed == 0
    assert 0 < row.ttft_p50_seconds <= row.ttft_p95_seconds <= row.total_p95_seconds
    assert row.pieces_per_second > 0
    row = streamed(served, dict(zip(answers, reversed(answers.values()), strict=True)), 0.2)
    assert row.num_mixed == row.num_streams > 0
    row = streamed(served, {"word " * 5000: ""}, 0.1)  # too long for the model
    assert row.num_lost == row.num_streams > 0
    assert httpx.get(f"{served.server.url}/readyz").status_code == 200


@pytest.mark.slow
def test_the_commands(run: Run) -> None:
    ways = ("--ways", "kvrag,full prefill", "--clients", "2", "--requests", "2", "--rounds", "1")
    done = run("bench", "throughput", "--model", "kvrag-tiny", *ways, "--json")
    assert [row["way"] for row in done.json] == ["kvrag", t.FULL]
    assert done.json[1]["of_full"] == 1.0
    done = run("bench", "serve", "--clients", "3", "--seconds", "2", "--prompts", "5", "--json")
    alone, together = done.json
    assert (alone["num_clients"], together["num_clients"]) == (1, 3)
    assert together["num_lost"] == together["num_mixed"] == 0 < together["num_streams"]
