"""Requests to ``kvrag serve-kv``, read so that no two readers can differ.

llhttp, through aiohttp, has refused folded headers, bare line feeds, NUL, white space before a
colon, several lengths and a length beside chunks by the time a request comes here.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from http import HTTPStatus

from aiohttp import web

from kvrag.chunk import ChunkKey
from kvrag.store.http_protocol import RECORDS

METHODS = ("GET", "HEAD", "PUT", "DELETE")
MAX_RECORD_BYTES = 4 << 30
MAX_HEADERS = 48
MAX_LINE_BYTES = 4096
"""Limit for the request line, for a header's name and for its value."""

_RANGE = re.compile(r"bytes=(?:(\d{1,19})-(\d{1,19})?|-(\d{1,19}))", re.ASCII)
_NAME = re.compile(rf"{RECORDS}/([0-9a-f]{{40}})")
_PORT = re.compile(r":\d{0,5}", re.ASCII)
_MAX_LENGTH_DIGITS = 19
# Headers that readers disagree on when repeated: one takes the first value, another the last.
_ONCE = (
    "Host",
    "Authorization",
    "Range",
    "If-Match",
    "If-None-Match",
    "Expect",
)


class RefusedError(Exception):
    """A request that is answered with a status and the reason.

    Attributes
    ----------
    ends
        Whether the connection ends, so that an unread body is not taken for a request.
    """

    def __init__(
        self,
        status: HTTPStatus,
        why: str,
        headers: dict[str, str] | None = None,
        *,
        ends: bool = True,
    ) -> None:
        super().__init__(why)
        self.status = status
        self.why = why
        self.headers = headers or {}
        self.ends = ends


class Gate:
    """Decides whether a request is allowed.

    Parameters
    ----------
    token
        Token that requests must send; "" admits every request whose ``Host`` is this machine.
    """

    def __init__(self, token: str) -> None:
        self._digest = _digest(token.encode()) if token else b""

    def check(self, request: web.BaseRequest) -> None:
        """Raise RefusedError for unauthorised requests and for ambiguous ones."""
        headers = request.headers
        repeated = [name for name in _ONCE if len(headers.getall(name, ())) > 1]
        if repeated:
            raise RefusedError(HTTPStatus.BAD_REQUEST, f"{repeated[0]} was sent more than once")
        if request.version not in ((1, 0), (1, 1)):
            raise RefusedError(
                HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, "this server speaks HTTP/1.1 alone"
            )
        if request.version == (1, 1) and "Host" not in headers:
            raise RefusedError(HTTPStatus.BAD_REQUEST, "HTTP/1.1 asks for the header Host")
        if self._digest:
            self._check_token(headers.get("Authorization", ""))
        elif "Host" in headers and not is_loopback(_host(headers["Host"])):
            # A page of another site whose name was made to resolve to here (DNS rebinding).
            raise RefusedError(
                HTTPStatus.FORBIDDEN,
                f"Host is {headers['Host'][:200]!r}: a server without a token answers to "
                "localhost alone; start it with a token",
            )
        if not request.raw_path.startswith("/"):
            raise RefusedError(
                HTTPStatus.BAD_REQUEST, f"{request.raw_path[:200]!r} is no path: it begins with '/'"
            )
        if "Upgrade" in headers:
            raise RefusedError(HTTPStatus.BAD_REQUEST, "this server speaks HTTP/1.1 alone")
        if request.method not in METHODS:
            raise RefusedError(
                HTTPStatus.NOT_IMPLEMENTED, f"expected {', '.join(METHODS)} as the method"
            )
        if request.method != "PUT" and _has_body(request):
            raise RefusedError(HTTPStatus.BAD_REQUEST, "only PUT has a body")

    def _check_token(self, authorization: str) -> None:
        # In constant time, so that the duration tells nothing about the token.
        scheme, _, given = authorization.partition(" ")
        found = _digest(given.strip().encode("utf-8", "surrogateescape"))
        if not (hmac.compare_digest(found, self._digest) and scheme.lower() == "bearer"):
            raise RefusedError(
                HTTPStatus.UNAUTHORIZED,
                "this server asks for a token",
                {"WWW-Authenticate": "Bearer"},
            )


def key_of(request: web.BaseRequest) -> ChunkKey:
    """Return the key that a path names, as it was sent: nothing in it is decoded."""
    match = _NAME.fullmatch(request.raw_path)
    if match is None:
        raise RefusedError(
            HTTPStatus.NOT_FOUND,
            f"there is no {request.raw_path[:200]!r} here",
            ends=request.method == "PUT",
        )
    return ChunkKey(match[1])


def body_size(request: web.BaseRequest) -> int:
    """Return the length of the record that a request sends."""
    length = request.headers.get("Content-Length", "")
    if "Transfer-Encoding" in request.headers or not (length.isascii() and length.isdigit()):
        raise RefusedError(HTTPStatus.LENGTH_REQUIRED, "a record comes with its length")
        # A longer text is refused before it is turned into a number.
    size = int(length) if len(length) <= _MAX_LENGTH_DIGITS else MAX_RECORD_BYTES + 1
    if size > MAX_RECORD_BYTES:
        raise RefusedError(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"at most {MAX_RECORD_BYTES} bytes a record"
        )
    return size


def asked_range(request: web.BaseRequest, size: int) -> tuple[int, int] | None:
    """Return the first byte requested and the byte after the last; None for the whole record.

    The second is not larger than the first if the range holds none of the record's bytes.
    """
    match = _RANGE.fullmatch(request.headers.get("Range", ""))
    if match is None:
        return None
    first, last, suffix = match.groups()
    if suffix is not None:
        return max(0, size - int(suffix)), size
    return int(first), size if last is None else min(int(last) + 1, size)


def tags_of(header: str) -> list[str]:
    """Return the tags in an ``If-Match``."""
    return [one.strip() for one in header.split(",")]


def is_loopback(host: str) -> bool:
    """Return whether a name or address is this machine's own, whatever a name server says."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _host(header: str) -> str:
    """Return the name in a ``Host`` header, without its port."""
    if header.startswith("["):
        name, _, port = header[1:].partition("]")
    else:
        name, colon, digits = header.partition(":")
        port = colon + digits
    return name if not port or _PORT.fullmatch(port) else ""


def _has_body(request: web.BaseRequest) -> bool:
    headers = request.headers
    return "Transfer-Encoding" in headers or headers.get("Content-Length", "0") != "0"


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()
