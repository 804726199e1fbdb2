"""A store over HTTP/1.1: what ``kvrag serve-kv`` runs.

A record is read by ranges; each is asked for under the tag that the record had when it was opened
(``If-Match``), so bytes of two records are never mixed. `docs/stores.md` describes the requests.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import http.server
import json
import re
import socket
import socketserver
import ssl
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import Any

import xxhash

from kvrag.chunk import ChunkKey
from kvrag.errors import KVRagError, ParameterError, StoreUnreachableError
from kvrag.recordformat import MAGIC, MAX_HEADER_BYTES
from kvrag.store.base import Store, StoredRecord
from kvrag.store.encrypted import HEADER_BYTES as ENCRYPTED_HEADER_BYTES
from kvrag.store.encrypted import MAGIC as ENCRYPTED_MAGIC
from kvrag.store.http_protocol import PROTOCOL, RECORDS, ROOT, SERVICE

DEFAULT_PORT = 8650
MAX_CONNECTIONS = 64
MAX_RECORD_BYTES = 4 << 30

# Of a peer that sends or takes nothing, and of a connection that waits for its next request.
_SILENCE_SECONDS = 30.0
_PIECE_BYTES = 256 << 10
# Records a connection keeps open between two ranges of them.
_MAX_OPEN = 8
_LINES_A_PIECE = 1000
_MAX_LENGTH_DIGITS = 19
_RANGE = re.compile(r"bytes=(?:(\d{1,19})-(\d{1,19})?|-(\d{1,19}))")
_NAME = re.compile(rf"{RECORDS}/([0-9a-f]{{40}})")


class RecordServer(socketserver.ThreadingMixIn, http.server.HTTPServer):
    """Serves the records of a store to who knows the token.

    Parameters
    ----------
    store
        The store. It is the caller's to close.
    host, port
        Where to listen; port 0 takes a free one.
    token
        What requests must bring (``Authorization: Bearer``); "" lets everybody in.
    is_writable
        Whether records may be written and deleted.
    tls
        Certificate and key, for HTTPS; None: plain HTTP.
    max_connections
        Connections at the same time; one more is answered 503 and closed.

    Raises
    ------
    ParameterError
        When others than this machine could connect, and no token is asked for.
    OSError
        When the address cannot be listened on.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128
    allow_reuse_address = True

    def __init__(
        self,
        store: Store,
        host: str = "127.0.0.1",
        port: int = DEFAULT_PORT,
        *,
        token: str = "",
        is_writable: bool = False,
        tls: ssl.SSLContext | None = None,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        if not token and not _is_loopback(host):
            raise ParameterError(
                f"serving at {host!r} without a token would let everybody on the network read the "
                "store: give a token, or serve at 127.0.0.1"
            )
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.store = store
        self.is_writable = is_writable
        self.is_stopping = False
        self._token = _digest(token.encode()) if token else b""
        self._tls = tls
        self._slots = threading.BoundedSemaphore(max_connections)
        self._lock = threading.Lock()
        # Since when they wait for a request to come whole.
        self._idle: dict[socket.socket, float] = {}
        self._busy: set[socket.socket] = set()
        self._answers: Counter[int] = Counter()
        self._bytes_sent = 0
        super().__init__((host, port), _Handler)

    @property
    def url(self) -> str:
        """What `kvrag.store.registry.open_store` opens on this machine."""
        host = str(self.server_address[0])
        if host in ("0.0.0.0", "::"):
            host = socket.gethostname()
        host = f"[{host}]" if ":" in host else host
        return f"{'https' if self._tls else 'http'}://{host}:{self.server_port}"

    def counts(self) -> Mapping[str, Any]:
        """Return answers by status, and the bytes of records in them, so far."""
        with self._lock:
            return {"answers": dict(self._answers), "bytes_sent": self._bytes_sent}

    def stop(self, grace_seconds: float = 10.0) -> None:
        """Take no more requests, and wait so long for the answers that have begun.

        Must not be called by the thread that runs `serve_forever`.
        """
        self.is_stopping = True
        self.shutdown()
        self.server_close()
        deadline = time.monotonic() + grace_seconds
        with self._lock:
            _shut(set(self._idle))
        while time.monotonic() < deadline:
            with self._lock:
                if not self._busy:
                    break
            time.sleep(0.02)
        with self._lock:
            _shut(self._busy.union(self._idle))

    # -- of the handlers ------------------------------------------------------------------------

    def is_known(self, authorization: str) -> bool:
        """Say whether a header brings the token; how long that takes tells nothing of it."""
        scheme, _, given = authorization.partition(" ")
        if not self._token:
            return True
        found = _digest(given.strip().encode("utf-8", "surrogateescape"))
        return hmac.compare_digest(found, self._token) and scheme.lower() == "bearer"

    @contextlib.contextmanager
    def answering(self, connection: socket.socket) -> Iterator[None]:
        """Mark a connection as one whose answer is waited for when the server stops."""
        with self._lock:
            self._idle.pop(connection, None)
            self._busy.add(connection)
        try:
            yield
        finally:
            with self._lock:
                self._busy.discard(connection)
                self._idle[connection] = time.monotonic()

    def note(self, status: int, num_bytes: int = 0) -> None:
        """Count an answer."""
        with self._lock:
            self._answers[status] += 1
            self._bytes_sent += num_bytes

    # -- of the base classes --------------------------------------------------------------------

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread of its own, unless there are too many."""
        if not self._slots.acquire(blocking=False):
            self.note(HTTPStatus.SERVICE_UNAVAILABLE)
            if self._tls is None:
                request.settimeout(0.1)
                with contextlib.suppress(OSError):
                    request.sendall(
                        b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\n"
                        b"Content-Length: 0\r\nConnection: close\r\n\r\n"
                    )
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection to its end."""
        threading.current_thread().name = "kvrag-serve-connection"
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Agree on encryption, which may take long, in the connection's own thread."""
        if self._tls is not None:
            request.settimeout(_SILENCE_SECONDS)
            try:
                request = self._tls.wrap_socket(
                    request, server_side=True, do_handshake_on_connect=False
                )
            except (OSError, ValueError):
                return  # gone already
        try:
            with self._waiting(request):
                if self._tls is not None:
                    request.do_handshake()
                super().finish_request(request, client_address)
        finally:
            if self._tls is not None:
                # The socket underneath was given up to this one.
                self.shutdown_request(request)

    def service_actions(self) -> None:
        """Let go of who has taken too long to send a request, were it byte by byte."""
        late = time.monotonic() - _SILENCE_SECONDS
        with self._lock:
            _shut({connection for connection, since in self._idle.items() if since < late})

    @contextlib.contextmanager
    def _waiting(self, connection: socket.socket) -> Iterator[None]:
        with self._lock:
            self._idle[connection] = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                self._idle.pop(connection, None)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a peer that went away, or one that sends no HTTP."""


class _Handler(http.server.BaseHTTPRequestHandler):
    server: RecordServer
    protocol_version = "HTTP/1.1"
    timeout = _SILENCE_SECONDS
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        self._open: dict[ChunkKey, tuple[str, StoredRecord]] = {}
        self._is_asked_for = False

    def finish(self) -> None:
        for _, record in self._open.values():
            record.close()
        super().finish()

    def version_string(self) -> str:
        return SERVICE

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def handle_expect_100(self) -> bool:
        """Ask for no body before it is known who sends it, and whether he may."""
        self._is_asked_for = True
        return True

    def do_GET(self) -> None:
        self._answer(self._get)

    do_HEAD = do_GET  # noqa: N815

    def do_PUT(self) -> None:
        self._answer(self._put)

    def do_DELETE(self) -> None:
        self._answer(self._delete)

    # -- private --------------------------------------------------------------------------------

    def _answer(self, work: Any) -> None:
        with self.server.answering(self.connection):
            try:
                if self.server.is_stopping:
                    self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, "the server is stopping")
                elif not self.server.is_known(self.headers.get("Authorization", "")):
                    self._refuse(
                        HTTPStatus.UNAUTHORIZED,
                        "this server asks for a token",
                        {"WWW-Authenticate": "Bearer"},
                    )
                elif self._is_ambiguous():
                    self._refuse(HTTPStatus.BAD_REQUEST, "its headers can be read in two ways")
                elif self.command != "PUT" and self._has_body():
                    self._refuse(HTTPStatus.BAD_REQUEST, "only PUT has a body")
                else:
                    work()
            except StoreUnreachableError as error:
                self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, f"the store does not answer: {error}")
            except KVRagError as error:
                self._refuse(HTTPStatus.BAD_GATEWAY, f"the store refuses: {error}")

    def _is_ambiguous(self) -> bool:
        """Say whether a proxy in front may have seen other headers (RFC 9112 §11.2).

        Behind a line that is none, the library ends the headers; of several it gives the first.
        """
        lengths = self.headers.get_all("Content-Length", [])
        return bool(self.headers.defects or self.headers.get_payload()) or len(lengths) > 1

    def _has_body(self) -> bool:
        return "Transfer-Encoding" in self.headers or self.headers.get("Content-Length", "0") != "0"

    def _key(self) -> ChunkKey | None:
        match = _NAME.fullmatch(self.path)
        if match is None:
            self._refuse(HTTPStatus.NOT_FOUND, f"there is no {self.path[:200]!r} here")
            return None
        return ChunkKey(match[1])

    def _get(self) -> None:
        if self.path == ROOT:
            about = {
                "service": SERVICE,
                "protocol": PROTOCOL,
                "is_writable": self.server.is_writable,
            }
            self._send(HTTPStatus.OK, json.dumps(about).encode(), "application/json")
            return
        if self.path == RECORDS:
            self._list()
            return
        key = self._key()
        if key is None:
            return
        wanted = self.headers.get("If-Match")
        found = self._opened(key, wanted)
        if found is None:
            self._refuse(HTTPStatus.NOT_FOUND, f"there is no record {key}")
            return
        tag, record = found
        if wanted is not None and wanted.strip() != "*" and tag not in _tags(wanted):
            self._refuse(HTTPStatus.PRECONDITION_FAILED, f"record {key} has been replaced")
            return
        size = record.size_bytes
        first, end = 0, size
        status = HTTPStatus.OK
        if (asked := _RANGE.fullmatch(self.headers.get("Range", ""))) is not None:
            first, end = _range(asked, size)
            if first >= end:
                headers = {"Content-Range": f"bytes */{size}", "ETag": tag}
                self._refuse(
                    HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE,
                    f"record {key} has {size} bytes",
                    headers,
                    ends=False,
                )
                return
            status = HTTPStatus.PARTIAL_CONTENT
        self._send_record(status, record, tag, first, end)

    def _opened(self, key: ChunkKey, wanted: str | None) -> tuple[str, StoredRecord] | None:
        """Return a record and its tag: the one that is open, if that is the one wanted."""
        known = self._open.get(key)
        if known is not None and wanted is not None and known[0] in _tags(wanted):
            return known
        record = self.server.store.open(key)
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

    def _send_record(
        self, status: HTTPStatus, record: StoredRecord, tag: str, first: int, end: int
    ) -> None:
        is_wanted = self.command == "GET"
        # The first piece is read before anything is promised: what fails then is an answer.
        piece = bytearray(min(_PIECE_BYTES, end - first) if is_wanted else 0)
        record.read_into(first, memoryview(piece))
        self.send_response(status)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(end - first))
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", tag)
        if status == HTTPStatus.PARTIAL_CONTENT:
            self.send_header("Content-Range", f"bytes {first}-{end - 1}/{record.size_bytes}")
        self.end_headers()
        self.server.note(status, end - first if is_wanted else 0)
        view = memoryview(piece)
        while view:
            self.wfile.write(view)
            first += len(view)
            view = view[: end - first]
            try:
                record.read_into(first, view)
            except KVRagError:
                # All that is left to say it with: the body ends before its promised length.
                self.close_connection = True
                return

    def _list(self) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/plain; charset=ascii")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.server.note(HTTPStatus.OK)
        if self.command == "HEAD":
            return
        lines: list[str] = []
        try:
            for key, size in self.server.store.sizes():
                lines.append(f"{key} {size}\n")
                if len(lines) == _LINES_A_PIECE:
                    self._write_piece("".join(lines))
                    lines.clear()
        except KVRagError:
            self.close_connection = True
            return
        if lines:
            self._write_piece("".join(lines))
        self.wfile.write(b"0\r\n\r\n")

    def _write_piece(self, text: str) -> None:
        self.wfile.write(f"{len(text):x}\r\n{text}\r\n".encode("ascii"))

    def _put(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not self._may_write():
            return
        if "Transfer-Encoding" in self.headers or not length.isascii() or not length.isdigit():
            self._refuse(HTTPStatus.LENGTH_REQUIRED, "a record comes with its length")
            return
        # Of thousands of digits no number is made.
        size = int(length) if len(length) <= _MAX_LENGTH_DIGITS else MAX_RECORD_BYTES + 1
        if size > MAX_RECORD_BYTES:
            self._refuse(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"at most {MAX_RECORD_BYTES} bytes a record"
            )
            return
        key = self._key()
        if key is None:
            return
        if self._is_asked_for:
            self._is_asked_for = False
            super().handle_expect_100()
        content = self.rfile.read(size)
        if len(content) < size:
            self.close_connection = True
            return
        if self.headers.get("If-None-Match", "").strip() == "*":
            self.server.store.put(key, content)
        else:
            self.server.store.replace(key, content)
        self._send(HTTPStatus.NO_CONTENT)

    def _delete(self) -> None:
        if not self._may_write():
            return
        key = self._key()
        if key is None:
            return
        if self.server.store.delete(key):
            self._send(HTTPStatus.NO_CONTENT)
        else:
            self._refuse(HTTPStatus.NOT_FOUND, f"there is no record {key}", ends=False)

    def _may_write(self) -> bool:
        if not self.server.is_writable:
            self._refuse(
                HTTPStatus.FORBIDDEN, "this server only reads: start it with --writable to write"
            )
        return self.server.is_writable

    def _send(
        self,
        status: HTTPStatus,
        body: bytes = b"",
        content_type: str = "text/plain; charset=utf-8",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if status != HTTPStatus.NO_CONTENT:
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        self.server.note(status)

    def _refuse(
        self,
        status: HTTPStatus,
        why: str,
        headers: Mapping[str, str] | None = None,
        *,
        ends: bool | None = None,
    ) -> None:
        """Answer why not. A body that was not read would be taken for the next request."""
        if ends is None:
            ends = status not in (HTTPStatus.NOT_FOUND, HTTPStatus.PRECONDITION_FAILED)
        if ends or self.command == "PUT":
            self.close_connection = True
        self._send(status, (why + "\n").encode(), headers=headers)


def tls_context(certificate: str, key: str | None) -> ssl.SSLContext:
    """Return what a server encrypts with. Raises ParameterError where the files are of no use."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise ParameterError(
            f"{certificate}{f' and {key}' if key else ''}: no certificate and key in PEM format "
            f"({getattr(error, 'strerror', None) or error})"
        ) from error
    return context


def _tag_of(record: StoredRecord) -> str:
    """Return what tells a record from any other of its key.

    A record's header has the checksums of all its blocks, an encrypted one's a salt of its own;
    of other bytes all are read.
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


def _tags(header: str) -> list[str]:
    return [one.strip() for one in header.split(",")]


def _range(asked: re.Match[str], size: int) -> tuple[int, int]:
    """Return the first byte asked for, and the one behind the last; empty where there are none."""
    first, last, suffix = asked.groups()
    if suffix is not None:
        return max(0, size - int(suffix)), size
    end = size if last is None else min(int(last) + 1, size)
    return int(first), end


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or re.fullmatch(r"127(\.\d{1,3}){3}", host) is not None


def _shut(connections: set[socket.socket]) -> None:
    for connection in connections:
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
