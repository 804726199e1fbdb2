"""Answers of ``kvrag serve-kv``: records, whole or in ranges, and lists of them.

Clients read a record by ranges. Each range is requested under the tag that the record had when it
was opened (``If-Match``), so bytes of two records never mix. `docs/stores.md` describes the
requests.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from functools import partial
from http import HTTPStatus
from itertools import islice
from typing import Any, TypeVar

import xxhash
from aiohttp import web

from kvrag.chunk import ChunkKey
from kvrag.errors import KVRagError, StoreUnreachableError
from kvrag.recordformat import MAGIC, MAX_HEADER_BYTES
from kvrag.store.base import Store, StoredRecord
from kvrag.store.encrypted import HEADER_BYTES as ENCRYPTED_HEADER_BYTES
from kvrag.store.encrypted import MAGIC as ENCRYPTED_MAGIC
from kvrag.store.http_protocol import PROTOCOL, RECORDS, ROOT, SERVICE
from kvrag.store.server_requests import RefusedError, asked_range, body_size, key_of, tags_of

T = TypeVar("T")

SILENCE_SECONDS = 30.0
"""Time after which the server drops a peer that takes or sends no bytes of a body."""

MIN_BODY_BYTES_PER_SECOND = 64 << 10
"""The server stops waiting for a record that arrives more slowly, after `SILENCE_SECONDS`."""

_PIECE_BYTES = 512 << 10
# Records that a connection keeps open between reads of two ranges.
_MAX_OPEN = 8
_LINES_A_PIECE = 1000


class Answers:
    """State that all connections share.

    Parameters
    ----------
    store
        The store.
    is_writable
        Whether records may be written and deleted.
    threads
        Runs the store's calls, since they block.
    """

    def __init__(self, store: Store, is_writable: bool, threads: Executor) -> None:
        self.store = store
        self.is_writable = is_writable
        self.threads = threads
        self.statuses: Counter[int] = Counter()
        self.bytes_sent = 0


class Session:
    """One connection: answers its requests, and keeps the records open that it reads."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._open: dict[ChunkKey, tuple[str, StoredRecord]] = {}
        self._work: asyncio.Future[Any] | None = None

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request.

        Raises
        ------
        RefusedError
            When the answer is a refusal.
        """
        try:
            if request.method == "PUT":
                return await self._put(request)
            if request.method == "DELETE":
                return await self._delete(request)
            return await self._get(request)
        except StoreUnreachableError as error:
            raise RefusedError(
                HTTPStatus.SERVICE_UNAVAILABLE, f"the store does not answer: {error}"
            ) from error
        except KVRagError as error:
            raise RefusedError(HTTPStatus.BAD_GATEWAY, f"the store refuses: {error}") from error

    async def close(self) -> None:
        """Close the records, once no thread reads them."""
        if self._work is not None:
            await asyncio.wait([self._work])
        for _, record in self._open.values():
            record.close()
        self._open.clear()

    async def send(
        self,
        request: web.BaseRequest,
        status: HTTPStatus,
        body: bytes | bytearray = b"",
        headers: Mapping[str, str] | None = None,
        *,
        ends: bool = False,
    ) -> web.StreamResponse:
        """Send an answer that fits into memory."""
        response = web.Response(status=status, body=body, headers=self._headers(status, headers))
        if ends:
            response.force_close()
        async with asyncio.timeout(SILENCE_SECONDS):
            await response.prepare(request)
            await response.write_eof()
        return response

    # -- private --------------------------------------------------------------------------------

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Call the store in a thread. The call finishes even if nobody waits for it any more."""
        future = asyncio.get_running_loop().run_in_executor(self._answers.threads, work)
        self._work = future
        return await asyncio.shield(future)

    def _headers(self, status: HTTPStatus, headers: Mapping[str, str] | None) -> Mapping[str, str]:
        self._answers.statuses[status] += 1
        return {"Server": SERVICE, "Content-Type": "text/plain; charset=utf-8", **(headers or {})}

    async def _get(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.raw_path == ROOT:
            about = {
                "service": SERVICE,
                "protocol": PROTOCOL,
                "is_writable": self._answers.is_writable,
            }
            kind = {"Content-Type": "application/json"}
            return await self.send(request, HTTPStatus.OK, json.dumps(about).encode(), kind)
        if request.raw_path == RECORDS:
            return await self._list(request)
        key = key_of(request)
        wanted = request.headers.get("If-Match")

        def read() -> tuple[str, StoredRecord, tuple[int, int] | None, bytearray]:
            found = self._opened(key, wanted)
            if found is None:
                raise RefusedError(HTTPStatus.NOT_FOUND, f"there is no record {key}", ends=False)
            tag, record = found
            if wanted is not None and wanted.strip() != "*" and tag not in tags_of(wanted):
                raise RefusedError(
                    HTTPStatus.PRECONDITION_FAILED, f"record {key} has been replaced", ends=False
                )
            size = record.size_bytes
            asked = asked_range(request, size)
            first, end = asked or (0, size)
            if asked is not None and first >= end:
                raise RefusedError(
                    HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE,
                    f"record {key} has {size} bytes",
                    {"Content-Range": f"bytes */{size}", "ETag": tag},
                    ends=False,
                )
            # Read the first piece before sending a status: a failure can then still be answered.
            return tag, record, asked, _piece(record, first, end if request.method == "GET" else 0)

        tag, record, asked, piece = await self._in_thread(read)
        first, end = asked or (0, record.size_bytes)
        headers = {
            "Content-Type": "application/octet-stream",
            "Accept-Ranges": "bytes",
            "ETag": tag,
        }
        if asked is not None:
            headers["Content-Range"] = f"bytes {first}-{end - 1}/{record.size_bytes}"
        status = HTTPStatus.OK if asked is None else HTTPStatus.PARTIAL_CONTENT
        if request.method == "GET":
            self._answers.bytes_sent += end - first
            if len(piece) == end - first:
                return await self.send(request, status, piece, headers)
        response = web.StreamResponse(status=status, headers=self._headers(status, headers))
        response.content_length = end - first
        await response.prepare(request)
        if request.method == "GET":
            await self._send_pieces(request, response, record, piece, first, end)
        return response

    async def _send_pieces(
        self,
        request: web.BaseRequest,
        response: web.StreamResponse,
        record: StoredRecord,
        piece: bytearray,
        first: int,
        end: int,
    ) -> None:
        while piece:
            first += len(piece)
            # While one is sent, the next is read.
            reading = asyncio.create_task(self._in_thread(partial(_piece, record, first, end)))
            # If the peer is gone, nobody needs the failure.
            reading.add_done_callback(lambda done: done.cancelled() or done.exception())
            try:
                async with asyncio.timeout(SILENCE_SECONDS):
                    await response.write(piece)
                piece = await reading
            except KVRagError:
                # The only way left to report it: the body ends before its announced length.
                _break_off(request)
                return
            finally:
                reading.cancel()

    def _opened(self, key: ChunkKey, wanted: str | None) -> tuple[str, StoredRecord] | None:
        """Return a record and its tag: the open record if it is the one wanted."""
        known = self._open.get(key)
        if known is not None and wanted is not None and known[0] in tags_of(wanted):
            return known
        record = self._answers.store.open(key)
        if record is None:
            return None
        try:
            tag = _tag_of(record)
        except BaseException:
            record.close()
            raise
        if known is not None:
            known[1].close()
            del self._open[key]
        elif len(self._open) == _MAX_OPEN:
            self._open.pop(next(iter(self._open)))[1].close()
        self._open[key] = tag, record
        return tag, record

    async def _list(self, request: web.BaseRequest) -> web.StreamResponse:
        records = await self._in_thread(self._answers.store.sizes)
        lines = await self._in_thread(lambda: _lines(records))
        status = HTTPStatus.OK
        kind = {"Content-Type": "text/plain; charset=ascii"}
        response = web.StreamResponse(status=status, headers=self._headers(status, kind))
        await response.prepare(request)
        while lines and request.method == "GET":
            async with asyncio.timeout(SILENCE_SECONDS):
                await response.write(lines)
            try:
                lines = await self._in_thread(lambda: _lines(records))
            except KVRagError:
                _break_off(request)
                break
        return response

    async def _put(self, request: web.BaseRequest) -> web.StreamResponse:
        self._check_writable()
        size = body_size(request)
        key = key_of(request)
        if request.headers.get("Expect", "").lower() == "100-continue":
            # Only now are the sender and its permission to write known.
            assert request.transport is not None
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        content = await _body(request, size)
        is_kept = request.headers.get("If-None-Match", "").strip() == "*"
        store = self._answers.store
        write = store.put if is_kept else store.replace
        await self._in_thread(lambda: write(key, content))
        return await self.send(request, HTTPStatus.NO_CONTENT)

    async def _delete(self, request: web.BaseRequest) -> web.StreamResponse:
        self._check_writable()
        key = key_of(request)
        if not await self._in_thread(lambda: self._answers.store.delete(key)):
            raise RefusedError(HTTPStatus.NOT_FOUND, f"there is no record {key}", ends=False)
        return await self.send(request, HTTPStatus.NO_CONTENT)

    def _check_writable(self) -> None:
        if not self._answers.is_writable:
            raise RefusedError(
                HTTPStatus.FORBIDDEN, "this server only reads: start it with --writable to write"
            )


async def _body(request: web.BaseRequest, size: int) -> bytes:
    """Return a body that arrives at a fair pace. Raises TimeoutError otherwise."""
    pieces = []
    async with asyncio.timeout(SILENCE_SECONDS + size / MIN_BODY_BYTES_PER_SECOND):
        while size:
            async with asyncio.timeout(SILENCE_SECONDS):
                piece = await request.content.readany()
            if not piece:
                raise ConnectionResetError("the body ended before its promised length")
            pieces.append(piece)
            size -= len(piece)
    return b"".join(pieces)


def _break_off(request: web.BaseRequest) -> None:
    if request.transport is not None:
        request.transport.abort()


def _piece(record: StoredRecord, first: int, end: int) -> bytearray:
    """Read the next bytes of a record; none at its end."""
    piece = bytearray(max(0, min(_PIECE_BYTES, end - first)))
    if piece:
        record.read_into(first, memoryview(piece))
    return piece


def _lines(records: Iterator[tuple[ChunkKey, int]]) -> bytes:
    return "".join(f"{key} {size}\n" for key, size in islice(records, _LINES_A_PIECE)).encode()


def _tag_of(record: StoredRecord) -> str:
    """Return a tag that distinguishes a record from any other record of its key.

    A record's header has the checksums of all its blocks, and an encrypted one has a random salt.
    For other bytes the tag covers all of them.
    """
    size = record.size_bytes
    head = bytearray(min(size, MAX_HEADER_BYTES))
    record.read_into(0, memoryview(head)[: 16 if len(head) >= 16 else len(head)])
    length = size
    if head.startswith(MAGIC):
        length = min(int.from_bytes(head[12:16], "little"), len(head))
    elif head.startswith(ENCRYPTED_MAGIC):
        length = min(ENCRYPTED_HEADER_BYTES, len(head))
    digest = xxhash.xxh3_128(size.to_bytes(8, "little"))
    piece = bytearray(min(length, _PIECE_BYTES))
    for first in range(0, length, _PIECE_BYTES):
        view = memoryview(piece)[: length - first]
        record.read_into(first, view)
        digest.update(view)
    return f'"{digest.hexdigest()}"'
