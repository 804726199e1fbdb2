"""An MCP server over one index: tools for agents that search it, ask it and read in it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import anyio.to_thread
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import BaseModel, Field

import kvrag
from kvrag.arguments import shown
from kvrag.chunk import Chunk
from kvrag.engine.engine import KVEngine
from kvrag.errors import KVRagError
from kvrag.server.citing import chunks_around, title_of

_MOST_CHUNKS = 50
_MOST_NEIGHBOURS = 20

Question = Annotated[str, Field(description="A question in plain language.")]
Count = Annotated[int, Field(ge=1, le=_MOST_CHUNKS, description="Number of chunks.")]
Near = Annotated[int, Field(ge=0, le=_MOST_NEIGHBOURS)]
Wanted = Annotated[
    dict[str, Any] | None,
    Field(
        description="Which chunks may be found, by metadata: {'source': 'a.md'}, or with $and, "
        "$or, $in, $gte and the like."
    ),
]


class Passage(BaseModel):
    """A chunk of a document.

    Attributes
    ----------
    chunk_id
        Its id, for the tool `read_chunk`.
    source, title, ordinal
        The document, its name, and the number of the chunk in it.
    text
        The chunk's text.
    metadata
        What is known of the document and the chunk, such as its page.
    """

    chunk_id: str
    source: str
    title: str
    ordinal: int
    text: str
    metadata: dict[str, Any]


class Hit(Passage):
    """A chunk that a search found; `score` ranks it among the others."""

    score: float


class Found(BaseModel):
    """What a search found, best first."""

    hits: list[Hit]


class Reply(BaseModel):
    """An answer from the index.

    Attributes
    ----------
    text
        The answer.
    finish_reason
        ``"stop"``, or why it is cut: ``"length"``, ``"loop"`` (it repeats itself) or ``"timeout"``.
    sources
        The chunks that the model read, best first.
    """

    text: str
    finish_reason: str
    sources: list[Passage]


class Passages(BaseModel):
    """Consecutive chunks of one document, in its order."""

    passages: list[Passage]


def make_server(
    engine: KVEngine, top_k: int = 4, options: Mapping[str, Any] | None = None
) -> MCPServer[Any]:
    """Return an MCP server with the tools ``search``, ``answer`` and ``read_chunk``.

    Parameters
    ----------
    engine
        What answers. The caller closes its index after the server's end.
    top_k
        Number of chunks that a question is answered from, if a call says nothing else.
    options
        Fields of each answer's `Request`.
    """
    index = engine.index
    server: MCPServer[Any] = MCPServer(
        "kvrag",
        version=kvrag.__version__,
        instructions=f"Documents of the index {index.name!r}. Use `search` to find passages, "
        "`answer` to have a local model answer from them, `read_chunk` to read on around one.",
    )

    @server.tool()
    async def search(question: Question, k: Count = 5, filter: Wanted = None) -> Found:
        """Find the passages of the documents that a question is about, best first."""
        with _told():
            hits = await anyio.to_thread.run_sync(lambda: index.search(question, k, filter=filter))
        return Found(hits=[Hit(**_fields(hit.chunk), score=hit.score) for hit in hits])

    @server.tool()
    async def answer(question: Question, k: Count = top_k, filter: Wanted = None) -> Reply:
        """Answer a question from the documents, with a local model, and name the passages used."""
        with _told():
            asked = await anyio.to_thread.run_sync(
                lambda: engine.question(question, k, filter=filter, **(options or {}))
            )
            # A call that its client cancels ends here, and the engine stops writing.
            found = await engine.agenerate(asked)
        return Reply(
            text=found.text,
            finish_reason=found.finish_reason,
            sources=_passages(index.get_chunks([source.chunk_id for source in found.sources])),
        )

    @server.tool()
    async def read_chunk(
        chunk_id: Annotated[str, Field(description="As `search` and `answer` give it.")],
        before: Annotated[Near, Field(description="How many chunks before it as well.")] = 0,
        after: Annotated[Near, Field(description="How many chunks after it as well.")] = 0,
    ) -> Passages:
        """Read one chunk, and its neighbours in the document."""

        def read() -> list[Passage]:
            found = chunks_around(index, chunk_id, before, after)
            if not found:
                raise ToolError(
                    f"there is no chunk {shown(chunk_id)}: give an id that search returned; the "
                    "documents may have changed since"
                )
            return _passages(found)

        with _told():
            return Passages(passages=await anyio.to_thread.run_sync(read))

    return server


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Give the client kvrag's own errors; the SDK hides the text of others."""
    try:
        yield
    except KVRagError as error:
        raise ToolError(str(error)) from error


def _passages(chunks: Sequence[Chunk]) -> list[Passage]:
    return [Passage(**_fields(chunk)) for chunk in chunks]


def _fields(chunk: Chunk) -> dict[str, Any]:
    return {
        "chunk_id": chunk.chunk_id,
        "source": chunk.source,
        "title": title_of(chunk),
        "ordinal": chunk.ordinal,
        "text": chunk.text,
        "metadata": dict(chunk.metadata),
    }
