"""The documents of a served index: listed for everybody, added and deleted if the server allows."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path, PurePath
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi import Path as InPath
from starlette.responses import Response, StreamingResponse

from kvrag.arguments import shown
from kvrag.errors import DocumentError
from kvrag.ingest.index import Index
from kvrag.ingest.loaders import SUFFIXES
from kvrag.ingest.report import IngestProgress, IngestReport
from kvrag.server import responses as r
from kvrag.server.gate import DOCUMENTS
from kvrag.server.problems import BusyError, RequestError, as_problem
from kvrag.server.retrieving import title_of
from kvrag.server.service import PRIVATE, Service, private

_MAX_NAME = 200
_RETRY_SECONDS = 5
_BODY = {
    "requestBody": {
        "required": True,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}

Event = dict[str, Any]
Source = Annotated[str, Query(max_length=10_000)]


def uploads_path(index: Path) -> Path:
    """Return the folder beside an index that uploaded files are kept in."""
    return index.with_name(f"{index.name}.uploads")


class Documents:
    """Adds documents to an index one at a time, and deletes them.

    Parameters
    ----------
    index
        The index.
    can_write
        Whether requests may add and delete.
    """

    def __init__(self, index: Index, *, can_write: bool) -> None:
        self._index = index
        self._can_write = can_write
        self._folder = uploads_path(index.path)
        self._adding = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def find(self) -> list[dict[str, Any]]:
        """Return the documents, ordered by source."""
        files = set(self._index.catalog.files_under("/"))
        return [
            {
                "source": one.source,
                "title": title_of(one)[:_MAX_NAME],
                "num_chunks": one.num_chunks,
                "num_tokens": one.num_tokens,
                "is_file": not files.isdisjoint(_paths(one.source)),
            }
            for one in self._index.documents()
        ]

    def delete(self, source: str) -> int:
        """Delete a document, and its file if it was uploaded; return the number of chunks."""
        self._check_writable()
        num_chunks = self._index.delete(sources=[source])
        path = Path(source)
        if path.parent == self._folder.resolve():
            path.unlink(missing_ok=True)
        return num_chunks

    async def add(self, name: str, body: AsyncIterator[bytes]) -> AsyncIterator[Event]:
        """Take a file, add it to the index, and return the events of that.

        Raises
        ------
        RequestError
            When the file is refused.
        """
        self._check_writable()
        target = self._target(name)
        async with contextlib.AsyncExitStack() as stack:
            await self._take_turn(stack)
            self._folder.mkdir(mode=0o700, exist_ok=True)
            # Its name begins with a dot, so no ingestion takes it for a document.
            number, part = tempfile.mkstemp(dir=self._folder, prefix=".upload-")
            stack.callback(Path(part).unlink, missing_ok=True)
            with os.fdopen(number, "wb") as file:
                async for piece in body:
                    await asyncio.to_thread(file.write, piece)
            os.replace(part, target)  # noqa: PTH105
            return self._begin(target, stack.pop_all(), is_new=True)

    async def read_again(self, source: str) -> AsyncIterator[Event]:
        """Read a document's file again, and return the events of that.

        Unchanged content costs no model time; damaged content is written again.

        Raises
        ------
        RequestError
            When the document is unknown, or has no file.
        """
        self._check_writable()
        path = await asyncio.to_thread(self._file_of, source)
        async with contextlib.AsyncExitStack() as stack:
            await self._take_turn(stack)
            return self._begin(path, stack.pop_all(), is_new=False)

    async def _take_turn(self, stack: contextlib.AsyncExitStack) -> None:
        if self._adding.locked():
            raise BusyError("another document is being added; try again later", _RETRY_SECONDS)
        await stack.enter_async_context(self._adding)

    def _file_of(self, source: str) -> Path:
        """Return the file of a document, which the index has read. Raises RequestError."""
        catalog = self._index.catalog
        if catalog.digest_of(source) is None:
            raise _no_document(source)
        for path in _paths(source):
            if catalog.file(path) is not None:
                return Path(path)
        raise RequestError(
            400,
            f"{shown(source)} was not read from a file, so it cannot be read again",
            code="not_a_file",
        )

    def _begin(
        self, path: Path, stack: contextlib.AsyncExitStack, *, is_new: bool
    ) -> AsyncIterator[Event]:
        events: asyncio.Queue[Event] = asyncio.Queue()
        # It goes on if the client leaves: a document is added whole.
        task = asyncio.create_task(self._run(path, events, stack, is_new=is_new))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return _until_done(events)

    async def _run(
        self,
        path: Path,
        events: asyncio.Queue[Event],
        stack: contextlib.AsyncExitStack,
        *,
        is_new: bool,
    ) -> None:
        loop = asyncio.get_running_loop()

        def tell(progress: IngestProgress) -> None:
            event = {
                "stage": progress.stage,
                "num_tokens_done": progress.num_tokens_done,
                "num_tokens": progress.num_tokens,
            }
            loop.call_soon_threadsafe(events.put_nowait, event)

        async with stack:
            try:
                report = await asyncio.to_thread(
                    self._index.add, [path], force=not is_new, on_progress=tell
                )
                last = _outcome(report, path)
            except DocumentError as error:
                last = _refused(path, str(error))
            except Exception as error:
                last = as_problem(error).to_dict()
            if "error" in last and is_new:
                path.unlink(missing_ok=True)
        events.put_nowait(last)

    def _check_writable(self) -> None:
        if not self._can_write:
            raise RequestError(
                403,
                "this server takes and deletes no documents; start it with --allow-upload",
                code="uploads_not_allowed",
            )

    def _target(self, name: str) -> Path:
        """Return where a file goes. Raises RequestError if its name is no good."""
        is_name = name == PurePath(name).name and name.isprintable() and not name.startswith(".")
        if not is_name or "\\" in name or ":" in name or len(name.encode()) > _MAX_NAME:
            raise RequestError(
                400, f"{shown(name)} is no name of a file; rename the file, and try again"
            )
        if PurePath(name).suffix.lower() not in SUFFIXES:
            known = ", ".join(sorted(SUFFIXES))
            raise RequestError(400, f"{shown(name)}: expected a file of the kinds {known}")
        target = self._folder.resolve() / name
        if target.exists():
            raise RequestError(
                409, f"there is a document {shown(name)}; delete it first", code="exists"
            )
        return target


def _outcome(report: IngestReport, path: Path) -> Event:
    if report.failed:
        return _refused(path, f"{path.name}: {report.failed[0].reason}")
    return {"stage": "done", "num_chunks": report.num_chunks}


def _refused(path: Path, reason: str) -> Event:
    """Return the error that says why, without the names of the server's folders."""
    message = reason.replace(str(path), path.name)
    return RequestError(400, message, code="not_added").to_dict()


def _paths(source: str) -> tuple[str, str]:
    """Return the paths that a document's file may have: ``path#row`` is a row of a table."""
    return source, source.rpartition("#")[0]


def _no_document(source: str) -> RequestError:
    return RequestError(404, f"there is no document {shown(source)}", code="not_found")


async def _until_done(events: asyncio.Queue[Event]) -> AsyncIterator[Event]:
    while True:
        event = await events.get()
        yield event
        if "error" in event or event["stage"] == "done":
            return


def _lines(events: AsyncIterator[Event]) -> Response:
    lines = (f"{json.dumps(event)}\n" async for event in events)
    return StreamingResponse(lines, media_type="application/x-ndjson", headers=PRIVATE)


def add_documents(app: FastAPI, service: Service, documents: Documents, answers: Any) -> None:
    """Add the routes of documents.

    Parameters
    ----------
    app, service, documents
        The application, its service, and what adds and deletes.
    answers
        Returns the responses of a route for the OpenAPI document, from the model of a good one.
    """

    @app.get(DOCUMENTS, responses=answers(r.Documents))
    async def listed() -> Response:
        """List the documents."""
        found = await service.in_thread(documents.find)
        return private({"documents": found})

    @app.put(DOCUMENTS + "/{name}", openapi_extra=_BODY, responses=answers(r.Added, lines=True))
    async def add(name: Annotated[str, InPath(max_length=_MAX_NAME)], http: Request) -> Response:
        """Add a file; the answer has a line of JSON for each step, and says last how it ended."""
        return _lines(await documents.add(name, http.stream()))

    @app.post(DOCUMENTS, responses=answers(r.Added, lines=True))
    async def read_again(source: Source) -> Response:
        """Read a document's file again; the answer is that of adding it."""
        return _lines(await documents.read_again(source))

    @app.delete(DOCUMENTS, responses=answers(r.Deleted))
    async def delete(source: Source) -> Response:
        """Delete a document."""
        num_chunks = await service.in_thread(lambda: documents.delete(source))
        if not num_chunks:
            raise _no_document(source)
        return private({"num_chunks": num_chunks})
