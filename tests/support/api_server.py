"""kvrag's OpenAI-compatible server on a free local port, in a thread of the test's process."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
from httpx._config import DEFAULT_TIMEOUT_CONFIG

from kvrag.engine.answer import AnswerDelta
from kvrag.engine.engine import KVEngine
from kvrag.ingest.index import Index
from kvrag.server.app import ServerOptions, make_app
from kvrag.server.running import Server

# A client of the tests gives up after 5 seconds, which an answer of a busy machine may take.
vars(DEFAULT_TIMEOUT_CONFIG).update(dict.fromkeys(("connect", "read", "write", "pool"), 120.0))


@dataclass(frozen=True)
class Served:
    """A running server, its engine, and the names of its models."""

    server: Server
    engine: KVEngine
    model: str = "model"
    rag: str = "rag:index"

    @property
    def url(self) -> str:
        return f"{self.server.url}/v1"


@contextmanager
def serving(
    index: Index, options: ServerOptions | None = None, engine: KVEngine | None = None
) -> Iterator[Served]:
    """Serve an index while the block runs; the model's name is that of its folder."""
    engine = engine or KVEngine(index, max_tokens=16)
    server = Server(make_app(engine, options or ServerOptions()), port=0, grace_seconds=10)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield Served(server, engine)
    finally:
        server.stop()
        thread.join()


@contextmanager
def saying(text: str) -> Iterator[None]:
    """Let each answer have this text, in pieces."""
    stream = KVEngine.astream

    async def said(self: KVEngine, *given: Any, **options: Any) -> AsyncIterator[AnswerDelta]:
        async for delta in stream(self, *given, **options):
            if delta.answer is not None:
                for start in range(0, len(text), 7):
                    yield AnswerDelta(text[start : start + 7])
                    await asyncio.sleep(0.01)
                yield AnswerDelta("", replace(delta.answer, text=text))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KVEngine, "astream", said)
        yield


@contextmanager
def lasting() -> Iterator[threading.Event]:
    """Let each answer begin with pieces until the event is set: one of a model may end too soon."""
    released, stream = threading.Event(), KVEngine.astream

    async def slow(self: KVEngine, *given: Any, **options: Any) -> AsyncIterator[AnswerDelta]:
        while not released.is_set():
            yield AnswerDelta("on and ")
            await asyncio.sleep(0.01)
        async for delta in stream(self, *given, **options):
            yield delta

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KVEngine, "astream", slow)
        try:
            yield released
        finally:
            released.set()
