"""The documents of a served index: listed for everybody, added and deleted if the server allows."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import logging
import os
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
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
from kvrag.server.access import Account
from kvrag.server.citing import title_of
from kvrag.server.gate import DOCUMENTS
from kvrag.server.problems import BusyError, RequestError, as_problem
from kvrag.server.service import Service, record_of

_MAX_NAME = 200
_RETRY_SECONDS = 5
# Documents that are being received or wait for their turn; a tenant may have half of them.
_MAX_PENDING = 8
_PART = ".upload-"  # no ingestion takes a file for a document whose name begins with a dot
_BODY = {
    "requestBody": {
        "required": True,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}

logger = logging.getLogger("kvrag.server")
Event = dict[str, Any]
Source = Annotated[str, Query(max_length=10_000)]


def uploads_path(index: Path) -> Path:
    """Return the folder beside an index that uploaded files are kept in."""
    return index.with_name(f"{index.name}.uploads")


class _StoppedError(BaseException):
    """The server stops; no error of a document, which ingestion would note and go on."""


class Documents:
    """Adds documents to an index one at a time, and deletes them.

    A body is received first, and waits for its turn on disk. Its name is taken once the index has
    the whole file: after a kill it can be sent again.

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
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_stopping = False
        self._names: set[Path] = set()
        self._num_pending: Counter[str] = Counter()  # by tenant
        if can_write:
            _remove_parts(self._folder)

    def find(self) -> r.Documents:
        """Return the documents, ordered by source."""
        documents = [
            r.Document(
                source=one.source,
                title=title_of(one)[:_MAX_NAME],
                num_chunks=one.num_chunks,
                num_tokens=one.num_tokens,
                is_file=one.file is not None,
            )
            for one in self._index.documents()
        ]
        return r.Documents(documents=documents)

    def kept_bytes(self, tenant: str) -> int:
        """Return the bytes of a tenant's uploads: files, what waits, and KV."""
        folder = self._folder_of(tenant)
        files = folder.iterdir() if folder.is_dir() else ()
        num_bytes = 0
        for one in files:
            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                num_bytes += one.stat().st_size if one.is_file() else 0
        start = str(folder / "x")[:-1]
        kv = (one.size_bytes for one in self._index.documents() if one.source.startswith(start))
        return num_bytes + sum(kv)

    async def delete(self, source: str) -> int:
        """Delete a document; return the number of chunks.

        The last document of an uploaded file takes the file with it.
        """
        self._check_writable()
        if self._turn.locked():
            raise BusyError("a document is being added; try again later", _RETRY_SECONDS)
        async with self._turn:
            return await asyncio.to_thread(self._delete, source)

    async def add(
        self,
        name: str,
        body: AsyncIterator[bytes],
        account: Account,
        check_room: Callable[[], Awaitable[None]],
    ) -> AsyncIterator[Event]:
        """Take a file, add it to the index, and return the events of that.

        Parameters
        ----------
        name, body, account
            The file, and whose it is.
        check_room
            Raises RequestError if the account may keep no more.

        Raises
        ------
        RequestError
            When the file is refused.
        """
        self._check_writable()
        target = self._target(name, account.tenant)
        taken = RequestError(
            409, f"there is a document {shown(name)}; delete it first", code="exists"
        )
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(self._pending(account.tenant))
            if target in self._names:
                raise taken
            self._names.add(target)
            stack.callback(self._names.discard, target)
            if await asyncio.to_thread(self._index.catalog.documents.file, str(target)) is not None:
                raise taken
            part = await self._receive(target.parent, body, stack)
            await check_room()
            return self._begin(target, part, account, stack.pop_all())

    async def read_again(self, source: str, account: Account) -> AsyncIterator[Event]:
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
            stack.enter_context(self._pending(account.tenant))
            return self._begin(path, None, account, stack.pop_all())

    def stop(self) -> None:
        """End what is being added soon, each with an error; any thread may call it."""
        self._is_stopping = True

    async def close(self) -> None:
        """Stop, and wait for the end."""
        self.stop()
        await asyncio.gather(*self._tasks)

    # -- private -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def _pending(self, tenant: str) -> Iterator[None]:
        """Count a document that is being received or waits. Raises BusyError."""
        own, total = self._num_pending[tenant], self._num_pending.total()
        if own >= _MAX_PENDING // 2 or total >= _MAX_PENDING:
            raise BusyError("too many documents are being added; try again later", _RETRY_SECONDS)
        self._num_pending[tenant] += 1
        try:
            yield
        finally:
            self._num_pending[tenant] -= 1

    async def _receive(
        self,
        folder: Path,
        body: AsyncIterator[bytes],
        stack: contextlib.AsyncExitStack,
    ) -> Path:
        """Write a body to a file, which ends with the stack unless it is renamed."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        number, name = tempfile.mkstemp(dir=folder, prefix=_PART)
        file = stack.enter_context(os.fdopen(number, "wb"))
        # Another server of this index, which starts now, must not take it for a leftover.
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        stack.callback(Path(name).unlink, missing_ok=True)
        async for piece in body:
            await asyncio.to_thread(file.write, piece)
        await asyncio.to_thread(file.flush)
        return Path(name)

    def _delete(self, source: str) -> int:
        documents = self._index.catalog.documents
        path = documents.file_of(source) or ""
        num_chunks = self._index.delete(sources=[source])
        is_upload = self._folder.resolve() in Path(path).parents
        if is_upload and not documents.documents_of_file(path):
            Path(path).unlink(missing_ok=True)
        return num_chunks

    def _file_of(self, source: str) -> Path:
        """Return the file of a document, which the index has read. Raises RequestError."""
        documents = self._index.catalog.documents
        if documents.digest_of(source) is None:
            raise _no_document(source)
        path = documents.file_of(source)
        if path is not None:
            return Path(path)
        raise RequestError(
            400,
            f"{shown(source)} was not read from a file, so it cannot be read again",
            code="not_a_file",
        )

    def _begin(
        self, path: Path, part: Path | None, account: Account, stack: contextlib.AsyncExitStack
    ) -> AsyncIterator[Event]:
        events: asyncio.Queue[Event] = asyncio.Queue()
        # It goes on if the client leaves: a document is added whole.
        task = asyncio.create_task(self._run(path, part, account, events, stack))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return _until_done(events)

    async def _run(
        self,
        path: Path,
        part: Path | None,
        account: Account,
        events: asyncio.Queue[Event],
        stack: contextlib.AsyncExitStack,
    ) -> None:
        loop = asyncio.get_running_loop()

        def tell(progress: IngestProgress) -> None:
            if self._is_stopping:
                raise _StoppedError
            event = {
                "stage": progress.stage,
                "num_tokens_done": progress.num_tokens_done,
                "num_tokens": progress.num_tokens,
            }
            loop.call_soon_threadsafe(events.put_nowait, event)

        async with stack:
            if self._turn.locked():
                events.put_nowait({"stage": "waiting"})
            async with self._turn:
                last, num_tokens = await asyncio.to_thread(self._add, path, part, tell)
            account.charge(num_tokens)
        events.put_nowait(last)

    def _add(
        self, path: Path, part: Path | None, tell: Callable[[IngestProgress], None]
    ) -> tuple[Event, int]:
        """Add or replace a file's documents; return the last event, and the tokens computed."""
        num_tokens = 0
        try:
            if self._is_stopping:
                raise _StoppedError
            if part is not None:
                os.replace(part, path)  # noqa: PTH105
            report = self._index.add([path], force=part is None, on_progress=tell)
            num_tokens = report.num_tokens_computed
            last = _outcome(report, path)
        except _StoppedError:
            message = "the server is stopping, so the document was not added; send it again"
            last = BusyError(message, _RETRY_SECONDS).to_dict()
        except DocumentError as error:
            last = _refused(path, str(error))
        except Exception as error:
            last = as_problem(error).to_dict()
        if "error" in last and part is not None:
            try:
                self._remove(path)
            except Exception:
                logger.exception("what was added of %s could not be removed", path)
        return last, num_tokens

    def _remove(self, path: Path) -> None:
        """Remove a file that was not added whole, and what the index has of it."""
        if sources := list(self._index.catalog.documents.documents_of_file(str(path))):
            self._index.delete(sources=sources)
        path.unlink(missing_ok=True)

    def _folder_of(self, tenant: str) -> Path:
        """Return the folder of a tenant's uploads; its name does not show the tenant's."""
        root = self._folder.resolve()
        return root / hashlib.sha256(tenant.encode()).hexdigest()[:16] if tenant else root

    def _check_writable(self) -> None:
        if not self._can_write:
            raise RequestError(
                403,
                "this server takes and deletes no documents; start it with --allow-upload",
                code="uploads_not_allowed",
            )

    def _target(self, name: str, tenant: str) -> Path:
        """Return where a file goes. Raises RequestError if its name is no good."""
        is_name = name == PurePath(name).name and name.isprintable() and not name.startswith(".")
        # U+FFFD stands for bytes that were no UTF-8: different names would be one.
        has_other = any(one in name for one in "\\:\ufffd")
        if not is_name or has_other or len(name.encode()) > _MAX_NAME:
            raise RequestError(
                400, f"{shown(name)} is no name of a file; rename the file, and try again"
            )
        if PurePath(name).suffix.lower() not in SUFFIXES:
            known = ", ".join(sorted(SUFFIXES))
            raise RequestError(400, f"{shown(name)}: expected a file of the kinds {known}")
        return self._folder_of(tenant) / name


def _remove_parts(folder: Path) -> None:
    """Remove bodies that no server is receiving any more."""
    for part in folder.rglob(f"{_PART}*"):
        with contextlib.suppress(OSError), part.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            part.unlink()


def _outcome(report: IngestReport, path: Path) -> Event:
    if report.failed:
        return _refused(path, f"{path.name}: {report.failed[0].reason}")
    return {"stage": "done", "num_chunks": report.num_chunks}


def _refused(path: Path, reason: str) -> Event:
    """Return the error that says why, without the names of the server's folders."""
    message = reason.replace(str(path), path.name)
    return RequestError(400, message, code="not_added").to_dict()


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
    return StreamingResponse(lines, media_type="application/x-ndjson")


def add_documents(app: FastAPI, service: Service, documents: Documents) -> None:
    """Add the routes of documents.

    Parameters
    ----------
    app, service, documents
        The application, its service, and what adds and deletes.
    """
    service.keepers.append(documents.kept_bytes)

    @app.get(DOCUMENTS, responses=r.ERRORS)
    async def listed() -> r.Documents:
        """List the documents."""
        return await service.in_thread(documents.find)

    @app.put(DOCUMENTS + "/{name}", openapi_extra=_BODY, responses=r.answers(r.Added, lines=True))
    async def add(name: Annotated[str, InPath(max_length=_MAX_NAME)], http: Request) -> Response:
        """Add a file; the answer has a line of JSON for each step, and says last how it ended."""
        account = record_of(http).account
        check_room = partial(service.check_room, account)
        return _lines(await documents.add(name, http.stream(), account, check_room))

    @app.post(DOCUMENTS, responses=r.answers(r.Added, lines=True))
    async def read_again(source: Source, http: Request) -> Response:
        """Read a document's file again; the answer is that of adding it."""
        return _lines(await documents.read_again(source, record_of(http).account))

    @app.delete(DOCUMENTS, responses=r.ERRORS)
    async def delete(source: Source) -> r.Deleted:
        """Delete a document."""
        num_chunks = await documents.delete(source)
        if not num_chunks:
            raise _no_document(source)
        return r.Deleted(num_chunks=num_chunks)
