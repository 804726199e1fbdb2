"""How prompts reach vLLM and answers come back piece by piece: over HTTP, or in this process."""

from __future__ import annotations

import itertools
import json
import os
import queue
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from http.client import HTTPException, HTTPResponse
from typing import Any, Protocol
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from kvrag.arguments import shown
from kvrag.engine.base import ROUTE_HEADER
from kvrag.engine.options import Sampling
from kvrag.errors import EngineError, ParameterError
from kvrag.llms.vllm.settings import PARAMS


@dataclass(frozen=True)
class EngineRequest:
    """One prompt and the options for answering it.

    Attributes
    ----------
    token_ids
        The prompt's token ids.
    params
        The request's ``kv_transfer_params`` (`kvrag.llms.vllm.settings.RequestParams`).
    max_tokens, sampling, stop
        See `kvrag.engine.request.Request`.
    ignore_end
        Whether the answer continues after an end-of-text token.
    route
        The prompt's key for a proxy before several servers (`kvrag.engine.base`).
    is_streamed
        Whether to send pieces as they are generated; a server sends kvrag's report only with a
        whole answer.
    """

    token_ids: Sequence[int]
    params: Mapping[str, Any]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop: Sequence[str] = ()
    ignore_end: bool = False
    route: str = ""
    is_streamed: bool = True

    def sampling_values(self) -> dict[str, Any]:
        """Return the sampling parameters, with the names that vLLM and its server share."""
        return {
            **asdict(self.sampling),
            "max_tokens": self.max_tokens,
            "stop": list(self.stop),
            "ignore_eos": self.ignore_end,
        }


@dataclass(frozen=True)
class Piece:
    """A piece of a streamed answer.

    Attributes
    ----------
    text
        The answer's text since the last piece.
    num_tokens
        The answer's tokens since the last piece.
    finish_reason
        Why the answer ended; None before the last piece.
    said
        kvrag's part of the server's response, with the last piece; None if there is none.
    num_cached
        Prompt tokens that the engine did not compute, by its own count, with the last piece.
    """

    text: str
    num_tokens: int = 0
    finish_reason: str | None = None
    said: Mapping[str, Any] | None = None
    num_cached: int = 0


class Transport(Protocol):
    """A connection to one running engine. You can use it from several threads."""

    def stream(self, request: EngineRequest) -> Iterator[Piece]:
        """Yield an answer piece by piece; closing the iterator aborts the request.

        Raises
        ------
        EngineError
            If the engine refuses the request or cannot be reached.
        """


# A connection to vLLM's OpenAI-compatible server, as `kvrag serve --engine vllm` starts it.


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
        body = {
            "model": self.model,
            "prompt": list(request.token_ids),
            **request.sampling_values(),
            "kv_transfer_params": dict(request.params),
        }
        if request.is_streamed:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        finish_reason = None
        with self._open("/completions", body, request.route) as response:
            for values in self._events(response, request.is_streamed):
                if "error" in values:
                    raise EngineError(f"{self._base_url}: {str(values['error'])[:_MAX_REASON]}")
                for choice in values["choices"]:
                    finish_reason = choice["finish_reason"] or finish_reason
                    yield Piece(choice["text"])
                if usage := values.get("usage"):
                    said = (values.get("kv_transfer_params") or {}).get(PARAMS)
                    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
                    yield Piece("", usage["completion_tokens"], finish_reason, said, int(cached))

    def _events(self, response: HTTPResponse, is_streamed: bool) -> Iterator[dict[str, Any]]:
        try:
            if not is_streamed:
                yield self._json(response.read())
                return
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


# vLLM in this process: one engine, which the threads that wait for answers drive.


_FOLLOW_SECONDS = 0.01
"""How long a request waits for its output before it tries to run the next step itself."""


class InProcess:
    """Requests of several threads, batched by one engine.

    Parameters
    ----------
    llm
        A ``vllm.LLM``, made with `kvrag.llms.vllm.options.engine_options`.

    Attributes
    ----------
    num_cached
        Prompt tokens that the engine did not compute for the last request, by its own count.
    """

    def __init__(self, llm: Any) -> None:
        self._engine = llm.llm_engine
        self._stepping = threading.Lock()
        self._knocking_lock = threading.Lock()
        self._num_knocking = 0
        self._outputs: dict[str, queue.SimpleQueue[Any]] = {}
        self._numbers = itertools.count()
        self.num_cached = 0

    def forget(self) -> None:
        """Empty the engine's prefix cache. Raise EngineError while requests are running."""
        with self._at_the_door():
            if not self._engine.reset_prefix_cache():
                raise EngineError(
                    "vLLM cannot empty its prefix cache while requests are running; wait for them"
                )

    def stream(self, request: EngineRequest) -> Generator[Piece, None, None]:
        """Yield an answer piece by piece; see `Transport`."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        name = f"kvrag-{id(self):x}-{next(self._numbers)}"
        params = SamplingParams(
            **request.sampling_values(),
            output_kind=RequestOutputKind.DELTA,
            extra_args={"kv_transfer_params": dict(request.params)},
        )
        mine = self._outputs[name] = queue.SimpleQueue()
        is_done = False
        try:
            with self._at_the_door():
                try:
                    prompt = {"prompt_token_ids": list(request.token_ids)}
                    self._engine.add_request(name, prompt, params)
                except Exception as error:  # its type depends on what is wrong with the request
                    is_done = True
                    raise EngineError(f"vLLM refuses the request: {error}") from error
            while not is_done:
                output = self._next(mine)
                is_done = output.finished
                if is_done:
                    self.num_cached = output.num_cached_tokens or 0
                yield _piece(output)
        finally:
            del self._outputs[name]
            if not is_done:
                with self._at_the_door():
                    self._engine.abort_request([name])

    @contextmanager
    def _at_the_door(self) -> Iterator[None]:
        """Hold the engine between two steps; threads that run steps give way to this one."""
        with self._knocking_lock:
            self._num_knocking += 1
        try:
            with self._stepping:
                yield
        finally:
            with self._knocking_lock:
                self._num_knocking -= 1

    def _next(self, mine: queue.SimpleQueue[Any]) -> Any:
        """Return the next output of one request; one of the waiting threads runs steps for all."""
        while True:
            try:
                return mine.get_nowait()
            except queue.Empty:
                pass
            if self._num_knocking or not self._stepping.acquire(blocking=False):
                # Another thread runs steps or waits to: our output comes through the queue.
                try:
                    return mine.get(timeout=_FOLLOW_SECONDS)
                except queue.Empty:
                    continue
            try:
                # The previous thread's last step may have delivered our output.
                if mine.empty():
                    self._step()
            finally:
                self._stepping.release()

    def _step(self) -> None:
        for output in self._engine.step():
            waiting = self._outputs.get(output.request_id)
            if waiting is not None:
                waiting.put(output)


def _piece(output: Any) -> Piece:
    completion = output.outputs[0]
    if completion.finish_reason not in (None, "stop", "length"):
        raise EngineError(f"vLLM ended the request: {completion.finish_reason}")
    return Piece(
        text=completion.text,
        num_tokens=len(completion.token_ids),
        finish_reason=completion.finish_reason,
        said=(output.kv_transfer_params or {}).get(PARAMS),
        num_cached=output.num_cached_tokens or 0,
    )
