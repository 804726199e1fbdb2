"""Errors in OpenAI's shape."""

from __future__ import annotations

import errno
import logging
from collections.abc import Mapping
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse

from kvrag.arguments import cut, shown
from kvrag.errors import (
    IndexClosedError,
    IndexLockedError,
    KVRagError,
    ParameterError,
    PromptTooLongError,
    StoreError,
    UnsupportedModelError,
)

logger = logging.getLogger("kvrag.server")

OLLAMA = "/api/"
"""Where the routes of Ollama's API are."""

INVALID = "invalid_request_error"
# Where a request takes a text or an object: what pydantic calls the two.
_BRANCHES = frozenset(
    {
        *("str", "NamedTool", "NamedFunctionTool", "RankedText"),
        *("MessageItem", "CallItem", "ResultItem"),
    }
)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)
CLIENT_GONE = 499  # nginx's; nobody receives it, but logs and metrics show it


class RequestError(Exception):
    """A request that is answered with an error.

    Parameters
    ----------
    status
        HTTP status.
    message
        What is wrong, and what to do.
    kind, code, param
        The fields ``type``, ``code`` and ``param`` of OpenAI's error object.
    retry_after
        Seconds after which the client may try again; None if that would not help.
    """

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = INVALID,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        # It may quote what the client sent, such as half of a surrogate pair.
        self.message = message.encode("utf-8", "backslashreplace").decode()
        self.kind = kind
        self.code = code
        self.param = param
        self.retry_after = retry_after

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers of the response."""
        headers = {}
        if self.retry_after is not None:
            headers["Retry-After"] = str(self.retry_after)
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return headers

    def response(self, path: str) -> JSONResponse:
        """Return the response to a request for `path`: in Ollama's shape, or in OpenAI's."""
        body = {"error": self.message} if path.startswith(OLLAMA) else self.to_dict()
        return JSONResponse(body, self.status, self.headers)

    def to_dict(self) -> dict[str, Any]:
        """Return the body of the response."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


class BusyError(RequestError):
    """The queue is full, or the server is stopping."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(503, message, "server_error", code="overloaded", retry_after=retry_after)


class LimitError(RequestError):
    """A key's limit is reached."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(
            429, message, "rate_limit_error", code="rate_limit_exceeded", retry_after=retry_after
        )


class ClientGoneError(RequestError):
    """The client has closed the connection."""

    def __init__(self) -> None:
        super().__init__(CLIENT_GONE, "the client has closed the connection")


def as_problem(error: Exception) -> RequestError:
    """Return an error as the client sees it; errors of the server itself go to the log."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, ClientDisconnect):
        return ClientGoneError()
    if isinstance(error, PromptTooLongError):
        return RequestError(400, str(error), code="context_length_exceeded")
    if isinstance(error, ParameterError | UnsupportedModelError):
        return RequestError(400, str(error))
    if isinstance(error, IndexLockedError):
        return BusyError("the index is being written to at the moment; try again later", 5)
    if (refused := _refused_by(error)) is not None:
        logger.error("%s: %s", type(error).__name__, error)
        return refused
    if isinstance(error, StoreError | IndexClosedError):
        logger.error("%s: %s", type(error).__name__, error)
        message = "the index cannot be read at the moment; the server's log says why"
        return RequestError(503, message, "server_error", retry_after=5)
    # The message may name paths of the server.
    logger.error("request failed", exc_info=error)
    known = f" ({type(error).__name__})" if isinstance(error, KVRagError) else ""
    return RequestError(
        500, f"the server failed{known}; its log says why", "server_error", code="internal_error"
    )


def _refused_by(error: BaseException | None) -> RequestError | None:
    """Return the problem if the system lacked room or descriptors, however deep below."""
    while error is not None:
        number = error.errno if isinstance(error, OSError) else None
        # The second: SQLite's own words.
        if number in _FULL or "database or disk is full" in str(error):
            message = "the server's disk is full: nothing was saved; its log says where"
            return RequestError(507, message, "server_error", code="disk_full")
        if number in _NO_DESCRIPTOR:
            return BusyError("the server has too many files open at the moment", 5)
        error = error.__cause__
    return None


def validation_problem(errors: list[Any]) -> RequestError:
    """Return pydantic's first error as a problem that names the parameter."""
    # A value of another kind also lacks fields: its kind is what was wrong.
    first = next((one for one in errors if one["type"] == "literal_error"), errors[0])
    branches = [number for number, part in enumerate(first["loc"]) if _is_branch(part)]
    if branches:
        # A text or a list: the error that is deepest inside says what is wrong, and no branch of
        # another type does. A list that is too long is nobody's other type.
        union = first["loc"][: branches[0]]
        same = (one for one in errors if one["loc"][: len(union)] == union)
        first = max(
            same,
            key=lambda one: (
                one["type"] == "too_long",
                len(one["loc"]),
                not one["type"].endswith("_type"),
            ),
        )
    # The first part is where the value was: body, query or path.
    place = [str(part) for part in first["loc"][1:] if not _is_branch(part)]
    param = cut(".".join(place)) or None
    if first["type"] == "extra_forbidden":
        return RequestError(
            400,
            f"unknown parameter {shown(param)}: this server does not support it; leave it out",
            code="unknown_parameter",
            param=param,
        )
    if isinstance(first.get("input"), bytes):
        return RequestError(
            400,
            "the body is not sent as JSON; send the header 'Content-Type: application/json'",
            code="invalid_json",
        )
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "")
        return RequestError(400, f"the body is not valid JSON: {reason}", code="invalid_json")
    # Only an empty list or object asks for nothing.
    if first["type"] == "too_long" and first["ctx"]["max_length"] == 0:
        return RequestError(
            400,
            f"{param}: this server does not support it; leave it out",
            code="unsupported_parameter",
            param=param,
        )
    message = cut(str(first["msg"]).removeprefix("Value error, "))
    where = f"{param}: " if param else "the body: "
    return RequestError(400, f"{where}{message}", code="invalid_value", param=param)


def _is_branch(part: Any) -> bool:
    """Return whether a part of a place is pydantic's name for a branch of a union."""
    return isinstance(part, str) and (part in _BRANCHES or part.startswith(("list[", "literal[")))
