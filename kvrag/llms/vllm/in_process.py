"""vLLM in this process: one engine, which the threads that wait for answers drive."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

from kvrag.errors import EngineError
from kvrag.llms.vllm.settings import PARAMS
from kvrag.llms.vllm.transports import EngineRequest, Piece

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
