"""A connection to vLLM's OpenAI-compatible server, as `kvrag serve --engine vllm` starts it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from http.client import HTTPException, HTTPResponse
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from kvrag.arguments import shown
from kvrag.engine.routing import ROUTE_HEADER
from kvrag.errors import EngineError, ParameterError
from kvrag.llms.vllm.settings import PARAMS
from kvrag.llms.vllm.transports import EngineRequest, Piece

API_KEY_VARIABLE = "KVRAG_SERVER_KEY"
"""Environment variable that holds the server's key, if it requires one."""

_MAX_REASON = 300


class HTTPServer:
    """A server by its address.

    Parameters
    ----------
    base_url
        Address of the API, such as ``http://127.0.0.1:8000/v1``.
    model
        The server's name for the model; None asks the server.
    timeout_seconds
        How long the server may be silent.

    Notes
    -----
    The server sends kvrag's report only with whole answers. Streamed answers contain only the
    server's own count of cached tokens.
    """

    def __init__(
        self, base_url: str, *, model: str | None = None, timeout_seconds: float = 600.0
    ) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise ParameterError(f"base_url {shown(base_url)}: expected http://HOST:PORT/v1")
        self._base_url = base_url.rstrip("/")
        self._model = model
        self._timeout_seconds = timeout_seconds

    @property
    def model(self) -> str:
        """The server's name for the model. Raises EngineError."""
        if self._model is None:
            with self._open("/models", None) as response:
                served = self._json(response.read())["data"]
            self._model = str(served[0]["id"])
        return self._model

    def stream(self, request: EngineRequest) -> Iterator[Piece]:
        """Yield an answer piece by piece; see `Transport`."""
        body = self._body(request)
        if not request.is_streamed:
            yield self._whole(body, request.route)
            return
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        finish_reason = None
        with self._open("/completions", body, request.route) as response:
            for values in self._events(response):
                if "error" in values:
                    raise EngineError(f"{self._base_url}: {str(values['error'])[:_MAX_REASON]}")
                for choice in values["choices"]:
                    finish_reason = choice["finish_reason"] or finish_reason
                    yield Piece(choice["text"], num_tokens=0)
                if values.get("usage"):
                    usage = values["usage"]
                    yield Piece(
                        "", usage["completion_tokens"], finish_reason, None, _num_cached(usage)
                    )

    def _whole(self, body: Mapping[str, Any], route: str) -> Piece:
        with self._open("/completions", body, route) as response:
            values = self._json(response.read())
        (choice,) = values["choices"]
        return Piece(
            text=choice["text"],
            num_tokens=values["usage"]["completion_tokens"],
            finish_reason=choice["finish_reason"],
            said=(values.get("kv_transfer_params") or {}).get(PARAMS),
            num_cached=_num_cached(values["usage"]),
        )

    def _body(self, request: EngineRequest) -> dict[str, Any]:
        return {
            "model": self.model,
            "prompt": list(request.token_ids),
            **request.sampling_values(),
            "kv_transfer_params": dict(request.params),
        }

    def _events(self, response: HTTPResponse) -> Iterator[dict[str, Any]]:
        try:
            for line in response:
                data = line.strip().removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return
                if data:
                    yield self._json(data)
        except (OSError, HTTPException) as error:
            raise EngineError(
                f"{self._base_url} closed the connection during an answer: {error}"
            ) from error
        raise EngineError(f"{self._base_url} ended its answer too early; ask again")

    def _open(self, path: str, body: Mapping[str, Any] | None, route: str = "") -> HTTPResponse:
        headers = {"Content-Type": "application/json"}
        if route:
            headers[ROUTE_HEADER] = route
        if key := os.environ.get(API_KEY_VARIABLE):
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        try:
            opened: HTTPResponse = urlopen(
                Request(self._base_url + path, data, headers), timeout=self._timeout_seconds
            )
        except HTTPError as error:
            reason = error.read(4096).decode(errors="replace")[:_MAX_REASON]
            raise EngineError(
                f"{self._base_url}{path} refuses the request ({error.code}): {reason}"
            ) from error
        except (URLError, OSError, HTTPException) as error:
            raise EngineError(
                f"{self._base_url} does not answer ({error}): start it with 'kvrag serve "
                "--engine vllm', or give another base_url"
            ) from error
        return opened

    def _json(self, data: bytes) -> dict[str, Any]:
        try:
            values = json.loads(data)
            if not isinstance(values, dict):
                raise ValueError(f"a {type(values).__name__}")
        except (ValueError, RecursionError) as error:
            raise EngineError(f"{self._base_url} does not speak the API: {error}") from error
        return values


def _num_cached(usage: Mapping[str, Any]) -> int:
    return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
