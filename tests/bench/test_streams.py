"""What `kvrag bench serve` counts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx
import pytest

from kvrag.server.app import ServerOptions
from kvrag_bench.serving.streams import _ask_all, _row
from tests.cli.conftest import Run, run
from tests.support.api_server import Served, serving
from tests.support.rag import PASSAGES, Rag, rag

__all__ = ["rag", "run"]


@pytest.fixture(scope="module")
def served(rag: Rag) -> Iterator[Served]:
    with serving(rag.index, ServerOptions(max_streams=2, max_waiting=2)) as running:
        yield running


def test_right_and_mixed_up_streams(served: Served) -> None:
    prompts = list(PASSAGES.values())[:2]
    asked = {prompt: served.engine.generate(prompt, max_tokens=6).text for prompt in prompts}
    seen = asyncio.run(_ask_all(served.url, asked, 2, 0.5, 6))
    assert seen.num_streams >= 2
    assert seen.num_lost == seen.num_mixed == 0
    assert len(seen.ttft) == seen.num_streams
    row = _row(seen, 2)
    assert 0 < row.ttft_p50_seconds <= row.ttft_p95_seconds <= row.total_p95_seconds
    assert row.pieces_per_second > 0
    wrong = dict(zip(asked, reversed(asked.values()), strict=True))
    seen = asyncio.run(_ask_all(served.url, wrong, 2, 0.2, 6))
    assert seen.num_mixed == seen.num_streams > 0


def test_lost_streams(served: Served) -> None:
    asked = {"word " * 5000: ""}  # too long for the model
    seen = asyncio.run(_ask_all(served.url, asked, 1, 0.1, 6))
    assert seen.num_lost == seen.num_streams > 0
    assert httpx.get(f"{served.server.url}/readyz").status_code == 200


@pytest.mark.slow
def test_the_command(run: Run) -> None:
    done = run("bench", "serve", "--clients", "3", "--seconds", "2", "--prompts", "5", "--json")
    assert done.code == 0, done.err
    alone, together = done.json
    assert (alone["num_clients"], together["num_clients"]) == (1, 3)
    assert together["num_lost"] == together["num_mixed"] == 0 < together["num_streams"]
