"""Records in another machine's store, over HTTP: the client of ``kvrag serve-kv``."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import socket
import ssl
import threading
from collections.abc import Iterator
from http import HTTPStatus
from typing import ClassVar, NoReturn
from urllib.parse import urlsplit

from kvrag.arguments import shown
from kvrag.chunk import ChunkKey
from kvrag.errors import ParameterError, StoreError, StoreUnreachableError
from kvrag.regularfile import require_regular
from kvrag.store.http_protocol import (
    PROTOCOL,
    RECORDS,
    ROOT,
    SERVICE,
    TOKEN_VARIABLE,
    read_token,
)
from kvrag.store.metrics import MISS_ABSENT, MISS_UNREADABLE, StoreMetrics
from kvrag.store.remote import (
    HeadedRecord,
    Options,
    RemoteStore,
    file_path,
    seconds,
    upload_seconds,
)

SCHEMES = ("http", "https")
DEFAULT_TIMEOUT_SECONDS = 5.0

# The answer that opens a record brings this much: most records' header, or all of a small record.
_HEAD_BYTES = 4096
_PIECE_BYTES = 256 << 10
_MAX_IDLE = 8
_MAX_REASON_BYTES = 300
_CONTENT_RANGE = re.compile(r"bytes (?:(\d{1,19})-(\d{1,19})|\*)/(\d{1,19})")
_LINE = re.compile(r"([0-9a-f]{40}) (\d{1,19})")
_MAX_LINE_BYTES = 100


class HttpRecord(HeadedRecord):
    """An opened record of an `HttpStore`."""

    def __init__(
        self, store: HttpStore, key: ChunkKey, size_bytes: int, tag: str, head: bytes
    ) -> None:
        super().__init__(key, size_bytes, head, store.metrics)
        self._store = store
        self._tag = tag
        self._reading: set[http.client.HTTPConnection] = set()
        self._is_cancelled = False
        self._lock = threading.Lock()

    def _fetch(self, first: int, buffer: memoryview) -> None:
        self._store.read_range(self._key, first, buffer, self._size_bytes, self._tag, self)

    def cancel(self) -> None:
        """Abort the reads of other threads, which raise StoreError there."""
        with self._lock:
            self._is_cancelled = True
            for connection in self._reading:
                if connection.sock is not None:
                    with contextlib.suppress(OSError):
                        connection.sock.shutdown(socket.SHUT_RDWR)

    @contextlib.contextmanager
    def reading(self, connection: http.client.HTTPConnection) -> Iterator[None]:
        """Let `cancel` abort what the block reads."""
        with self._lock:
            if self._is_cancelled:
                self._raise_cancelled()
            self._reading.add(connection)
        try:
            yield
        except (OSError, http.client.HTTPException, StoreError):
            if self._is_cancelled:
                self._raise_cancelled()
            raise
        finally:
            with self._lock:
                self._reading.discard(connection)

    def _raise_cancelled(self) -> NoReturn:
        raise StoreError(f"record {self._key}: reading it was broken off")


class HttpStore(RemoteStore):
    """Records on a server of ``kvrag serve-kv``.

    Parameters
    ----------
    url
        ``http://HOST:PORT[/PREFIX]`` or ``https://...``; the prefix is for a proxy that adds one.
    token_file
        File with the server's token; None uses the environment's (`TOKEN_VARIABLE`), if any.
    ca
        File of certificates to trust, in PEM format; None trusts those the system trusts.
    timeout_seconds
        How long a server may send nothing before it counts as unreachable.
    must_answer
        Raise if the server is unreachable now; otherwise it may become reachable later.

    Raises
    ------
    ParameterError
        When the URL, token or certificates are invalid.
    StoreUnreachableError
        When the server does not answer.
    StoreError
        When the server refuses the token, or is not kvrag's.
    """

    options: ClassVar[Options] = {
        "token_file": ("token_file", file_path),
        "ca": ("ca", file_path),
        "timeout": ("timeout_seconds", seconds),
    }

    def __init__(
        self,
        url: str,
        *,
        token_file: str | None = None,
        ca: str | None = None,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        must_answer: bool = True,
    ) -> None:
        self._scheme, self._host, self._port, self._prefix = _parts(url)
        self.url = url.rstrip("/")
        self._timeout_seconds = timeout_seconds
        self._headers = {"User-Agent": SERVICE}
        if token := read_token(token_file):
            self._headers["Authorization"] = f"Bearer {token}"
        self._tls = _trusting(ca) if self._scheme == "https" else None
        if ca is not None and self._tls is None:
            raise ParameterError(f"{url}: 'ca' is of https:// only: http:// is not encrypted")
        self._idle: list[http.client.HTTPConnection] = []
        self._process = os.getpid()
        self._lock = threading.Lock()
        self.metrics = StoreMetrics(self._scheme)
        try:
            self._greet()
        except StoreUnreachableError:
            if must_answer:
                raise

    def put(self, key: ChunkKey, record: bytes) -> None:
        """Write a record; an existing record stays. Raises StoreError."""
        self._write(key, record, {"If-None-Match": "*"})

    def replace(self, key: ChunkKey, record: bytes) -> None:
        """Write a record in place of the existing one. Raises StoreError."""
        self._write(key, record, {})

    def open(self, key: ChunkKey) -> HttpRecord | None:
        """Open a record for reading, or return None if there is none. Raises StoreError."""
        try:
            headers = {"Range": f"bytes=0-{_HEAD_BYTES - 1}"}
            with self._asking("GET", f"{RECORDS}/{key}", headers) as answer:
                if answer.status == HTTPStatus.NOT_FOUND:
                    self.metrics.miss(MISS_ABSENT)
                    return None
                is_empty = answer.status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE
                if not is_empty:
                    self._require(answer, HTTPStatus.PARTIAL_CONTENT)
                first, end, size = self._content_range(answer)
                tag = answer.getheader("ETag", "")
                expected = (0, 0, 0) if is_empty else (0, min(_HEAD_BYTES, size), size)
                if (first, end, size) != expected or not tag:
                    self._refuse_answer(answer, "the beginning of a record, and its tag")
                head = bytearray(end)
                _read_exactly(answer, memoryview(head))
        except StoreError:
            self.metrics.miss(MISS_UNREADABLE)
            raise
        self.metrics.hit()
        return HttpRecord(self, key, size, tag, bytes(head))

    def contains(self, key: ChunkKey) -> bool:
        """Say whether there is a record of `key`. Raises StoreError."""
        with self._asking("HEAD", f"{RECORDS}/{key}") as answer:
            if answer.status != HTTPStatus.NOT_FOUND:
                self._require(answer, HTTPStatus.OK)
            return answer.status == HTTPStatus.OK

    def delete(self, key: ChunkKey) -> bool:
        """Remove a record; say whether there was one. Raises StoreError."""
        with self._asking("DELETE", f"{RECORDS}/{key}") as answer:
            if answer.status != HTTPStatus.NOT_FOUND:
                self._require(answer, HTTPStatus.NO_CONTENT)
            return answer.status == HTTPStatus.NO_CONTENT

    def sizes(self) -> Iterator[tuple[ChunkKey, int]]:
        """Return keys and the bytes of their records, in no particular order. Raises StoreError."""
        found = []
        rest = b""
        with self._asking("GET", RECORDS) as answer:
            self._require(answer, HTTPStatus.OK)
            # Not by lines: a broken-off answer, too, ends a line, with no sign of the break.
            while piece := answer.read(_PIECE_BYTES):
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    match = _LINE.fullmatch(line.decode("ascii", "replace"))
                    if match is None:
                        self._refuse_answer(answer, "a list of records")
                    found.append((ChunkKey(match[1]), int(match[2])))
                if len(rest) > _MAX_LINE_BYTES:
                    break
            if rest:
                self._refuse_answer(answer, "a list of records")
        return iter(found)

    def close(self) -> None:
        """Close the idle connections."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def read_range(
        self,
        key: ChunkKey,
        first: int,
        buffer: memoryview,
        size_bytes: int,
        tag: str,
        record: HttpRecord,
    ) -> None:
        """Fill `buffer` from the record if it still has `tag`. Raises StoreError."""
        end = first + buffer.nbytes
        headers = {"Range": f"bytes={first}-{end - 1}", "If-Match": tag}
        with self._asking("GET", f"{RECORDS}/{key}", headers, record=record) as answer:
            if answer.status in (HTTPStatus.NOT_FOUND, HTTPStatus.PRECONDITION_FAILED):
                raise StoreError(
                    f"cannot read record {key} in {self.url}: it was deleted or replaced since it "
                    "was opened; open it again"
                )
            self._require(answer, HTTPStatus.PARTIAL_CONTENT)
            found = self._content_range(answer)
            if found != (first, end, size_bytes) or answer.getheader("ETag") != tag:
                self._refuse_answer(answer, f"bytes {first}-{end - 1}/{size_bytes} of {tag}")
            _read_exactly(answer, buffer)

    # -- private -----------------------------------------------------------------------------

    def _greet(self) -> None:
        with self._asking("GET", ROOT) as answer:
            if answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                self._require(answer, HTTPStatus.OK)
            try:
                about = json.loads(answer.read(4096)) if answer.status == HTTPStatus.OK else {}
                service, protocol = about["service"], about["protocol"]
            except (ValueError, KeyError, TypeError, RecursionError):
                service = protocol = None
        if service != SERVICE or protocol != PROTOCOL:
            found = f"protocol {protocol}" if service == SERVICE else f"an answer {answer.status}"
            raise StoreError(
                f"{self.url} is no server of this kvrag: expected protocol {PROTOCOL}, found "
                f"{found}; check the URL, and start the server with 'kvrag serve-kv'"
            )

    def _write(self, key: ChunkKey, record: bytes, headers: dict[str, str]) -> None:
        with self._asking("PUT", f"{RECORDS}/{key}", headers, body=record) as answer:
            self._require(answer, HTTPStatus.NO_CONTENT)
        self.metrics.wrote(len(record))

    @contextlib.contextmanager
    def _asking(
        self,
        method: str,
        path: str,
        headers: dict[str, str] | None = None,
        *,
        body: bytes | None = None,
        record: HttpRecord | None = None,
    ) -> Iterator[http.client.HTTPResponse]:
        """Yield the answer to a request; its connection is reused if all of it was read."""
        connection: http.client.HTTPConnection | None = None
        answer: http.client.HTTPResponse | None = None
        try:
            while True:
                connection, is_used = self._take()
                watching = record.reading(connection) if record else contextlib.nullcontext()
                with watching:
                    try:
                        if connection.sock is None:
                            connection.connect()
                        patience = upload_seconds(self._timeout_seconds, len(body or b""))
                        connection.sock.settimeout(patience)
                        connection.request(
                            method,
                            self._prefix + path,
                            body,
                            {**self._headers, **(headers or {})},
                        )
                        answer = connection.getresponse()
                    except (ConnectionError, http.client.BadStatusLine):
                        if not is_used:
                            raise
                        # The server had closed the idle connection; every request may repeat.
                        connection.close()
                        continue
                    if answer.status == HTTPStatus.UNAUTHORIZED:
                        self._raise_unauthorized()
                    yield answer
                break
            answer.read(_MAX_REASON_BYTES)
            if answer.isclosed() and not answer.will_close:
                self._give_back(connection)
                connection = None
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, ssl.SSLCertVerificationError):
                raise StoreError(
                    f"cannot ask {self.url}: its certificate is not trusted "
                    f"({error.verify_message}); name the file of who signed it: ?ca=FILE"
                ) from error
            why = str(error) or type(error).__name__
            raise StoreUnreachableError(
                f"cannot ask {self.url}: {why}; check that 'kvrag serve-kv' runs there, and the "
                "network, then try again"
            ) from error
        finally:
            if answer is not None:
                # A connection that the server closes belongs to its last answer.
                answer.close()
            if connection is not None:
                connection.close()

    def _take(self) -> tuple[http.client.HTTPConnection, bool]:
        """Return a connection, and whether it has been used before."""
        with self._lock:
            if self._process != os.getpid():
                # After a fork the connections belong to the other process, which reads from them.
                others, self._idle, self._process = self._idle, [], os.getpid()
                for connection in others:
                    connection.close()
            if self._idle:
                return self._idle.pop(), True
        if self._tls is not None:
            return (
                http.client.HTTPSConnection(
                    self._host, self._port, timeout=self._timeout_seconds, context=self._tls
                ),
                False,
            )
        return http.client.HTTPConnection(
            self._host, self._port, timeout=self._timeout_seconds
        ), False

    def _give_back(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            if len(self._idle) < _MAX_IDLE:
                self._idle.append(connection)
                return
        connection.close()

    def _raise_unauthorized(self) -> NoReturn:
        given = "the token is not this server's" if "Authorization" in self._headers else "no token"
        raise StoreError(
            f"{self.url} refuses access: {given}; put the server's token in {TOKEN_VARIABLE}, or "
            "in a file: ?token_file=PATH"
        )

    def _require(self, answer: http.client.HTTPResponse, status: HTTPStatus) -> None:
        if answer.status == status:
            return
        reason = answer.read(_MAX_REASON_BYTES).decode("utf-8", "replace")
        said = f"{self.url} answers {answer.status}: {' '.join(reason.split()) or answer.reason}"
        if answer.status == HTTPStatus.FORBIDDEN:
            raise StoreError(said)
        raise StoreUnreachableError(said)

    def _content_range(self, answer: http.client.HTTPResponse) -> tuple[int, int, int]:
        """Return the range's first byte, the byte after its last, and the record's length."""
        match = _CONTENT_RANGE.fullmatch(answer.getheader("Content-Range", ""))
        if match is None:
            self._refuse_answer(answer, "a range of a record")
        first, last, size = match.groups()
        return (0, 0, int(size)) if first is None else (int(first), int(last) + 1, int(size))

    def _refuse_answer(self, answer: http.client.HTTPResponse, expected: str) -> NoReturn:
        raise StoreError(
            f"{self.url}: expected {expected}, found an answer {answer.status} with "
            f"{shown(answer.getheader('Content-Range'))}, {shown(answer.getheader('ETag'))}; it is "
            "no server "
            "of this kvrag, or what is between changes its answers"
        )


def _read_exactly(answer: http.client.HTTPResponse, buffer: memoryview) -> None:
    """Fill a buffer. Raises StoreUnreachableError if the answer ends too early."""
    num_read = 0
    while num_read < buffer.nbytes:
        found = answer.readinto(buffer[num_read : num_read + _PIECE_BYTES])
        if not found:
            raise StoreUnreachableError(
                f"the answer ended after {num_read} of {buffer.nbytes} bytes; try again"
            )
        num_read += found


def _parts(url: str) -> tuple[str, str, int, str]:
    """Return a URL's scheme, host, port and prefix."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
        # As the name will be looked up.
        (host or "").encode("idna")
    except ValueError as error:
        raise ParameterError(f"{shown(url)} is no URL: {error}") from error
    if not all("!" <= character <= "~" for character in parts.path):
        raise ParameterError(f"{shown(url)} is no URL: its path holds more than visible ASCII")
    if parts.scheme not in SCHEMES or not host or parts.query or parts.fragment:
        raise ParameterError(
            f"a server is http://HOST:PORT or https://HOST:PORT; found {shown(url)}"
        )
    if parts.username is not None or parts.password is not None:
        raise ParameterError(
            f"{parts.scheme}://{host}: a URL is seen by others: put the token in {TOKEN_VARIABLE}, "
            "or in a file: ?token_file=PATH"
        )
    default = http.client.HTTPS_PORT if parts.scheme == "https" else http.client.HTTP_PORT
    return parts.scheme, host, port or default, parts.path.rstrip("/")


def _trusting(ca: str | None) -> ssl.SSLContext:
    try:
        if ca is not None:
            require_regular(ca)
        return ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError) as error:
        raise ParameterError(
            f"{ca}: no certificates in PEM format ({getattr(error, 'strerror', None) or error})"
        ) from error
