"""Servers in separate processes, as users start them, and clients that read streams of theirs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from kvrag.errors import EngineError

# For one stream, its wait included.
_TIMEOUT_SECONDS = 3600.0


@dataclass(frozen=True)
class StartedServer:
    """A server in another process: the address of its API, and the process if we started it."""

    url: str
    pid: int | None


@contextlib.contextmanager
def serving_index(index: object, *options: str) -> Iterator[StartedServer]:
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


@dataclass(frozen=True)
class Told:
    """What a client saw of one answer.

    Attributes
    ----------
    body
        What it asked.
    text, num_pieces
        The answer, and the pieces that it came in.
    ttft, seconds
        Seconds to its first text, and to its end, the wait included.
    usage
        The server's numbers of tokens.
    """

    body: dict[str, Any]
    text: str
    num_pieces: int
    ttft: float
    seconds: float
    usage: dict[str, int]


async def ask_all(
    url: str,
    bodies: Iterable[dict[str, Any]],
    num_clients: int,
    *,
    of_index: bool = False,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Told | None]:
    """Let clients ask, each again as soon as its answer has ended, until nothing is left to ask.

    Parameters
    ----------
    url
        Of the server's API.
    bodies
        What is asked: messages or a prompt.
    num_clients
        Streams at the same time.
    of_index
        Whether the model is asked that searches the server's index.
    clock
        Returns the seconds that answers are timed by.

    Returns
    -------
    list of Told or None
        None for each stream that was refused, or broke off before its end.
    """
    import aiohttp

    told: list[Told | None] = []
    left = iter(bodies)
    async with aiohttp.ClientSession(
        # llama.cpp's server closes a connection that has waited while it computes.
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=_TIMEOUT_SECONDS),
    ) as session:
        async with session.get(f"{url}/models") as response:
            names = [one["id"] for one in (await response.json())["data"]]
        model = next(name for name in names if name.startswith("rag:") or not of_index)

        async def client() -> None:
            for body in left:
                told.append(await _ask(session, url, {"model": model, **body}, clock))

        await asyncio.gather(*(client() for _ in range(num_clients)))
    return told


async def _ask(
    session: Any, url: str, body: dict[str, Any], clock: Callable[[], float]
) -> Told | None:
    import aiohttp

    route = "chat/completions" if "messages" in body else "completions"
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    begun, first, pieces, usage, has_ended = clock(), None, [], None, False
    try:
        async with session.post(f"{url}/{route}", json=asked) as response:
            async for line in response.content:
                has_ended |= line == b"data: [DONE]\n"
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                usage = event.get("usage") or usage
                for choice in event.get("choices", ()):
                    pieces.append(choice.get("text") or choice.get("delta", {}).get("content"))
                    if pieces[-1] and first is None:
                        first = clock() - begun
    except (aiohttp.ClientError, TimeoutError, ValueError):
        return None
    if not has_ended or usage is None:
        return None
    seconds = clock() - begun
    texts = [piece for piece in pieces if piece]
    # An answer may be empty.
    return Told(
        body, "".join(texts), len(texts), seconds if first is None else first, seconds, usage
    )
