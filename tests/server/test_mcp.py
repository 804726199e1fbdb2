"""`kvrag mcp`, with the SDK's own client: in this process, over stdin and stdout, and over HTTP."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from mcp import Client, StdioServerParameters

from kvrag.chunk import Document
from kvrag.engine.engine import KVEngine
from kvrag.ingest.index import Index
from kvrag.server.mcp import make_server
from tests.support.rag import PASSAGES, make_index

pytestmark = pytest.mark.asyncio
LONG = "\n\n".join(
    f"Page {n}: the {n}th ship of the year carried salt and rope." for n in range(40)
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("agents")
    index = make_index(folder, chunk_tokens=64)
    with index:
        index.add([Document(source=name, text=text) for name, text in PASSAGES.items()])
        index.add([Document(source="log/ships.md", text=LONG, metadata={"title": "The ships"})])
    return folder / "index"


@pytest.fixture(scope="module")
def engine(path: Path) -> Iterator[KVEngine]:
    with Index.open(path) as index:
        yield KVEngine(index, max_tokens=8)


async def call(server: Any, name: str, **arguments: Any) -> Any:
    async with Client(server) as client:
        return await client.call_tool(name, arguments)


async def test_a_search_finds_what_the_index_finds(engine: KVEngine) -> None:
    found = await call(make_server(engine), "search", question="harbour ledger", k=2)
    assert not found.is_error
    hits = found.structured_content["hits"]
    expected = engine.index.search("harbour ledger", 2)
    assert [hit["chunk_id"] for hit in hits] == [hit.chunk.chunk_id for hit in expected]
    assert hits[0]["source"] == hits[0]["title"] == "ledger"
    assert hits[0]["text"] == PASSAGES["ledger"]


async def test_an_answer_is_the_engines(engine: KVEngine) -> None:
    reply = await call(make_server(engine), "answer", question="Who keeps the ledger?", k=2)
    assert not reply.is_error
    content = reply.structured_content
    expected = engine.ask("Who keeps the ledger?", 2)
    assert content["text"] == expected.text
    assert [s["chunk_id"] for s in content["sources"]] == [s.chunk_id for s in expected.sources]
    assert len(content["sources"]) == 2


async def test_reading_on(engine: KVEngine) -> None:
    ids = engine.index.catalog.chunk_ids_of("log/ships.md")
    assert len(ids) > 4
    read = await call(make_server(engine), "read_chunk", chunk_id=ids[1], before=5, after=2)
    passages = read.structured_content["passages"]
    assert [p["chunk_id"] for p in passages] == ids[:4]
    assert {p["title"] for p in passages} == {"The ships"}
    assert passages[1]["text"] in LONG


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("read_chunk", {"chunk_id": "absent"}, "there is no chunk 'absent'"),
        ("read_chunk", {"chunk_id": "\ud800"}, "chunk"),
        ("search", {"question": " "}, "empty"),
        ("search", {"question": "x", "k": 51}, "less than or equal to 50"),
        ("search", {"question": "x", "filter": {"$nor": []}}, r"\$nor"),
        ("answer", {"question": ""}, "empty"),
    ],
)
async def test_wrong_calls_say_what_is_wrong(
    engine: KVEngine, name: str, arguments: dict[str, Any], message: str
) -> None:
    result = await call(make_server(engine), name, **arguments)
    assert result.is_error
    assert message.replace("\\", "") in result.content[0].text


@pytest.mark.slow
async def test_over_stdin_and_stdout(path: Path) -> None:
    """Nothing but messages may be on stdout: the client would stumble over it."""
    started = StdioServerParameters(
        command=sys.executable,
        args=["-m", "kvrag", "mcp", "-i", str(path), "--max-tokens", "4"],
        env=dict(os.environ),
    )
    async with Client(started) as client:
        tools = (await client.list_tools()).tools
        assert {tool.name for tool in tools} == {"search", "answer", "read_chunk"}
        assert all(tool.description for tool in tools)
        reply = await client.call_tool("answer", {"question": "Who keeps the ledger?"})
        assert reply.structured_content["sources"]


@pytest.mark.slow
async def test_over_http_for_this_machine_only(path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "kvrag", "mcp", "-i", str(path), "--http", "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        url = (await anyio.to_thread.run_sync(process.stdout.readline)).strip()
        assert url.startswith("http://127.0.0.1:")
        assert url.endswith("/mcp")
        async with Client(url) as client:
            found = await client.call_tool("search", {"question": "harbour ledger"})
            assert found.structured_content["hits"][0]["source"] == "ledger"
        # A web page whose name was made to resolve to this machine.
        async with httpx.AsyncClient() as http:
            for headers in ({"host": "evil.example"}, {"origin": "http://evil.example"}):
                refused = await http.post(url, json={}, headers=headers)
                assert 400 <= refused.status_code < 500
        process.send_signal(signal.SIGTERM)
        assert await anyio.to_thread.run_sync(process.wait) == 0
    finally:
        process.kill()
        process.communicate()
