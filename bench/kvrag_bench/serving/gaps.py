"""What one request may cost others: the longest gap of a stream of `kvrag serve` beside each.

The server runs in a separate process. One client reads streams, another asks a question over the
index again and again, and a third sends what an attacker would.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvrag.chunk import Document
from kvrag.errors import EngineError
from kvrag.ingest.index import Index
from kvrag.plugins import require
from kvrag_bench.serving.clients import serving_index
from kvrag_corpus import generate_corpus

_TIMEOUT_SECONDS = 120.0
_NUM_SOCKETS = 400
_NUM_DRIPPING = 20
_NUM_UPLOADED_WORDS = 55_000  # 340 KB


@dataclass(frozen=True)
class GapsRow:
    """One kind of request beside a stream and a question.

    Attributes
    ----------
    sent
        What was sent.
    answered
        The statuses of its answers; "left" where the client did not wait for one.
    longest_gap_seconds
        The longest time in which the stream brought nothing.
    question_seconds
        The longest time to a whole answer to the question.
    """

    sent: str
    answered: str
    longest_gap_seconds: float
    question_seconds: float


@dataclass
class _Watched:
    gap: float = 0.0
    question: float = 0.0
    ends: bool = False
    last: float = field(default_factory=time.perf_counter)

    def note(self) -> None:
        now = time.perf_counter()
        self.gap, self.last = max(self.gap, now - self.last), now


class _Server:
    """The server's address, the names of its models, and a session to ask it."""

    def __init__(self, url: str, names: list[str], session: Any, seconds: float) -> None:
        self.url, self.session, self.seconds = url, session, seconds
        self.model, self.rag, self.embedding = names[:3]
        self.host, _, port = url.split("/")[2].rpartition(":")
        self.port = int(port)

    async def post(self, route: str, body: Any, seconds: float | None = None) -> str:
        """Return the status of the answer, or leave after some seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds or _TIMEOUT_SECONDS):
                async with self.session.post(f"{self.url}/{route}", json=body) as answer:
                    await answer.read()
                    return str(answer.status)
        return "left"

    async def chat(self, **asked: Any) -> str:
        """Ask for an answer in a form."""
        messages = [{"role": "user", "content": "Answer."}]
        body = {"model": self.model, "messages": messages, "max_tokens": 60, **asked}
        return await self.post("chat/completions", body, self.seconds)

    async def form(self, kind: str, text: Any) -> str:
        """Ask for an answer in one form."""
        given = {"name": "form", "schema": text} if kind == "json_schema" else text
        return await self.chat(response_format={"type": kind, kind: given})

    async def connect(self, number: int, header: bytes, each: bytes) -> str:
        """Open connections that send a byte a second, or nothing."""
        opened = []
        with contextlib.suppress(OSError):
            for _ in range(number):
                _, writer = await asyncio.open_connection(self.host, self.port)
                writer.write(header)
                opened.append(writer)
        ends = time.perf_counter() + self.seconds
        while time.perf_counter() < ends:
            await asyncio.sleep(1)
            for writer in opened:
                if not writer.is_closing():
                    writer.write(each)
        for writer in opened:
            writer.close()
        return f"{len(opened)} open"


def _chain(length: int) -> dict[str, Any]:
    objects: dict[str, Any] = {
        f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}}
        for i in range(length)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**objects, f"d{length}": {"type": "string"}}}


def _rules(length: int) -> str:
    rules = "".join(f'r{i}: "a" r{i + 1}\n' for i in range(length))
    return f'start: r0\n{rules}r{length}: "b"\n'


def _words(number: int) -> str:
    draw = random.Random(0)
    return " ".join(str(draw.randrange(10**5)) for _ in range(number))


async def _tools(server: _Server) -> str:
    tool = {"type": "function", "function": {"name": "deep", "parameters": _chain(2000)}}
    return await server.chat(tools=[tool], tool_choice="required")


async def _vectors(server: _Server) -> str:
    body = {"model": server.embedding, "input": [_words(700)] * 2000}
    asked = [server.post("embeddings", body, server.seconds) for _ in range(4)]
    return ", ".join(sorted(set(await asyncio.gather(*asked))))


async def _rank(server: _Server) -> str:
    body = {"model": server.embedding, "query": "a", "documents": [_words(700)] * 2000}
    return await server.post("rerank", body, server.seconds)


async def _upload(server: _Server) -> str:
    address = f"{server.url}/kvrag/documents/long.txt"
    content = _words(_NUM_UPLOADED_WORDS).encode()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(server.seconds):
            async with server.session.put(address, data=content) as answer:
                await answer.read()
                return str(answer.status)
    return "left"


async def _deep_body(server: _Server) -> str:
    text = '{"a":' * 400 + "1" + "}" * 400
    return await server.form("json_schema", json.loads(text))


def _drip(length: int) -> bytes:
    return (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    ).encode()


_SENT: dict[str, Callable[[_Server], Awaitable[str]]] = {
    "nothing else": lambda server: server.connect(0, b"", b""),
    "a tool whose 2,000 objects refer to each other": _tools,
    "the same as response_format": lambda server: server.form("json_schema", _chain(2000)),
    "2,700 Lark rules, each naming the next": lambda server: server.form("lark", _rules(2700)),
    "anyOf of 2,000 objects": lambda server: server.form(
        "json_schema",
        {"anyOf": [{"type": "object", "properties": {f"k{i}": {}}} for i in range(2000)]},
    ),
    "allOf of 50 patterns": lambda server: server.form(
        "json_schema", {"allOf": [{"type": "string", "pattern": f"a{i}"} for i in range(50)]}
    ),
    "a whole number, multiple of 999,983": lambda server: server.form(
        "json_schema", {"type": "integer", "multipleOf": 999_983}
    ),
    "regex (a{1000}){1000}": lambda server: server.form("regex", "(a{1000}){1000}"),
    "regex ((((a{9}){9}){9}){9}){9}": lambda server: server.form(
        "regex", "((((a{9}){9}){9}){9}){9}"
    ),
    "a schema 400 deep": _deep_body,
    "a prompt of 3.9 MB": lambda server: server.post(
        "completions", {"model": server.model, "prompt": _words(660_000)}, server.seconds
    ),
    "four times 8 MB to embed, clients leave": _vectors,
    "8 MB to rank, client leaves": _rank,
    "an upload of 340 KB": _upload,
    f"{_NUM_SOCKETS} silent connections": lambda server: server.connect(_NUM_SOCKETS, b"", b""),
    f"{_NUM_DRIPPING} bodies at a byte a second": lambda server: server.connect(
        _NUM_DRIPPING, _drip(100_000), b" "
    ),
}


def measure_gaps(model: str, seconds: float, say: Callable[[str], None]) -> list[GapsRow]:
    """Measure each kind of request in turn.

    Parameters
    ----------
    model
        The model that is served.
    seconds
        The longest time to wait for each request; then its client leaves.
    say
        Told what is done.

    Raises
    ------
    ParameterError
        When the extra ``serve`` is not installed.
    EngineError
        When the server does not start, or ends.
    """
    require("fastapi", "serve")
    with tempfile.TemporaryDirectory(prefix="kvrag-bench-") as folder:
        say("indexing")
        path = Path(folder) / "index"
        corpus = generate_corpus(1, num_questions=10)
        with Index.create(path, model=model) as index:
            index.add([Document(one.document_id, one.text) for one in corpus.documents])
        with serving_index(path, "--allow-upload", "--session-bytes", "0") as server:
            return asyncio.run(_measure_all(server.url, corpus.questions[0].question, seconds, say))


async def _measure_all(
    url: str, question: str, seconds: float, say: Callable[[str], None]
) -> list[GapsRow]:
    import aiohttp

    rows = []
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_SECONDS)
    # Kept ones wait for their client, so the server may close them for others just then.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        async with session.get(f"{url}/models") as answer:
            names = [one["id"] for one in (await answer.json())["data"]]
        server = _Server(url, names, session, seconds)
        await _ask(server, question)  # the models are loaded
        for sent, send in _SENT.items():
            say(sent)
            watched = _Watched()
            beside = [
                asyncio.create_task(one)
                for one in (_read(server, watched), _ask_on(server, question, watched))
            ]
            await asyncio.sleep(1)
            watched.gap = watched.question = 0.0
            try:
                answered = await send(server)
                watched.ends = True
                await asyncio.gather(*beside)
            except aiohttp.ClientError as error:
                raise EngineError(f"{sent}: the server did not answer ({error})") from error
            rows.append(GapsRow(sent, answered, watched.gap, watched.question))
    return rows


async def _read(server: _Server, watched: _Watched) -> None:
    """Read one stream after the other."""
    body = {"model": server.model, "prompt": "Once ", "max_tokens": 200, "stream": True}
    watched.last = time.perf_counter()
    while not watched.ends:
        async with server.session.post(f"{server.url}/completions", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.content:
                if line.startswith(b"data: "):
                    watched.note()
    watched.note()


async def _ask_on(server: _Server, question: str, watched: _Watched) -> None:
    is_last = False
    while not is_last:
        is_last, started = watched.ends, time.perf_counter()
        await _ask(server, question)
        watched.question = max(watched.question, time.perf_counter() - started)
        await asyncio.sleep(0.2)


async def _ask(server: _Server, question: str) -> None:
    messages = [{"role": "user", "content": question}]
    body = {"model": server.rag, "messages": messages, "max_tokens": 8}
    async with server.session.post(f"{server.url}/chat/completions", json=body) as answer:
        answer.raise_for_status()
        await answer.read()
