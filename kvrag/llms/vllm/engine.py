"""`VLLMEngine`: an engine that lets a vLLM fuse and compute prompts."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from typing import Any, Self

from pydantic import Field, model_validator

from kvrag.arguments import shown
from kvrag.engine.answer import Answer, AnswerDelta, FinishReason, Usage
from kvrag.engine.base import Engine, route_key
from kvrag.engine.options import DEFAULT_MAX_TOKENS
from kvrag.engine.prompt_reader import PromptReader
from kvrag.engine.request import PlacedPrompt, Prompt, Recompute, Request, checked_batch
from kvrag.engine.shared import place_of, shared_index
from kvrag.errors import ParameterError, PromptTooLongError
from kvrag.eviction.registry import make_eviction
from kvrag.fusion.policies import DEFAULT_POLICY
from kvrag.fusion.report import FusionReport
from kvrag.ingest.index import Index
from kvrag.llms.settings import OF_ENGINES, EngineSettings
from kvrag.llms.vllm.options import engine_options
from kvrag.llms.vllm.settings import ConnectorSettings, RequestParams, require_tested
from kvrag.llms.vllm.transports import EngineRequest, HTTPServer, InProcess, Piece, Transport

_MAX_THREADS = 64
# What a request may ask of the engine alone, and why.
_REFUSED = {
    "eviction_policy": "vLLM keeps all keys of an answer",
    "ttft": "vLLM loads stored KV whole",
    "constraint": "a form (response_format, or a forced call) is kept where tokens are drawn",
    "logprobs": "kvrag does not read them from vLLM",
    "stop_loops": "vLLM ends its answers itself",
    "explain": "vLLM does not report what happened to single tokens",
}


class VLLMEngine:
    """Answers prompts over an index by means of a vLLM, which fuses and computes them.

    Answers are those of `kvrag.KVEngine`. The server finds the chunks itself; this class finds them
    too, to name an answer's sources. It loads no weights unless vLLM runs in this process.

    Parameters
    ----------
    index
        The index that the vLLM serves.
    connect
        Connects to the vLLM; called once, at the first prompt that can be served.
    """

    def __init__(self, index: Index, connect: Callable[[], Transport]) -> None:
        self.index = index
        self._connect = connect
        self._connecting = threading.Lock()
        self._connected: Transport | None = None
        self._reader = PromptReader(index)
        self.defaults = Request("", policy=DEFAULT_POLICY, max_tokens=DEFAULT_MAX_TOKENS)

    @property
    def transport(self) -> Transport:
        """The connection to the vLLM, made at first use."""
        with self._connecting:
            if self._connected is None:
                self._connected = self._connect()
            return self._connected

    @property
    def links_digest(self) -> str:
        """Always "": vLLM supports no link tokens."""
        return ""

    def generate(self, prompt: Prompt | Request, **options: Any) -> Answer:
        """Answer a prompt; for the parameters see `kvrag.KVEngine.generate`.

        Raises
        ------
        ParameterError
            If the request asks for something that vLLM cannot do (a placed prompt, eviction, a
            target time to first token), or as `KVEngine.generate` does.
        PromptTooLongError
            If the prompt leaves no room in the context window.
        EngineError
            If vLLM refuses the request or cannot be reached.
        """
        *_, last = self._answer(Request.of(prompt, options), is_streamed=False)
        assert last.answer is not None
        return last.answer

    def stream(self, prompt: Prompt | Request, **options: Any) -> Iterator[AnswerDelta]:
        """Answer a prompt piece by piece; parameters and errors as in `generate`."""
        return self._answer(Request.of(prompt, options), is_streamed=True)

    def generate_batch(
        self,
        prompts: Sequence[Prompt | Request],
        *,
        return_exceptions: bool = False,
        **options: Any,
    ) -> list[Any]:
        """Answer several prompts, asked at the same time; see `kvrag.KVEngine.generate_batch`."""

        def outcome(prompt: Prompt | Request) -> Answer | Exception:
            try:
                return self.generate(prompt, **options)
            except Exception as error:
                if return_exceptions:
                    return error
                raise

        batch = checked_batch(prompts)
        if not batch:
            return []
        with ThreadPoolExecutor(min(len(batch), _MAX_THREADS), "kvrag-ask") as pool:
            return list(pool.map(outcome, batch))

    async def astream(
        self, prompt: Prompt | Request, **options: Any
    ) -> AsyncGenerator[AnswerDelta, None]:
        """Answer a prompt as `stream`, waiting for vLLM in other threads."""
        done = object()
        deltas = await asyncio.to_thread(self.stream, prompt, **options)
        while (delta := await asyncio.to_thread(next, deltas, done)) is not done:
            yield delta  # type: ignore[misc]

    def _answer(self, asked: Request, *, is_streamed: bool) -> Iterator[AnswerDelta]:
        started = time.perf_counter()
        asked = asked.over(self.defaults)
        _check_servable(asked)
        timeout_seconds = asked.timeout_seconds
        assert isinstance(asked.policy, str)
        params = RequestParams(asked.policy, asked.ratio, asked.boundary_tokens, asked.reuse)
        laid_out = self._reader.lay_out(asked)
        layout = laid_out.layout
        num_prompt = len(layout.token_ids)
        left = self.index.config.max_positions - num_prompt
        if left < 1:
            raise PromptTooLongError(
                f"the prompt has {num_prompt} tokens, but the model holds "
                f"{self.index.config.max_positions} with at least one to answer in; retrieve fewer "
                "chunks"
            )
        assert asked.max_tokens is not None  # the engine's defaults set it
        request = EngineRequest(
            layout.token_ids,
            params.to_params(),
            min(asked.max_tokens, left),
            asked.sampling,
            tuple(asked.stop),
            route=route_key(layout.chunk_ids),
            # Only a stream can be stopped at the timeout.
            is_streamed=is_streamed or timeout_seconds is not None,
        )

        def run() -> Iterator[AnswerDelta]:
            text, num_tokens, ttft = "", 0, 0.0
            finish: str | None = None
            last = Piece("")
            for last in self.transport.stream(request):
                ttft = ttft or time.perf_counter() - started
                text += last.text
                num_tokens += last.num_tokens
                finish = last.finish_reason
                if last.text and finish is None:
                    yield AnswerDelta(last.text)
                is_late = (
                    timeout_seconds is not None and time.perf_counter() - started > timeout_seconds
                )
                if is_late and finish is None:
                    finish = "timeout"
                    break
            report = replace(
                _report(last, params, num_prompt, self.index.config.num_layers),
                # The server gets only token ids, so it cannot count these.
                num_neutralised=layout.num_neutralised,
                num_control=layout.num_control,
                num_folded=layout.num_folded,
            )
            answer = Answer(
                text=text,
                sources=laid_out.sources,
                report=report,
                usage=Usage(num_prompt, report.num_cached, num_tokens),
                finish_reason=_finish(finish),
                ttft_seconds=ttft,
                total_seconds=time.perf_counter() - started,
            )
            yield AnswerDelta(last.text if last.finish_reason else "", answer)

        return run()


def _check_servable(asked: Request) -> None:
    """Raise ParameterError if a request asks for something that vLLM cannot do."""
    if isinstance(asked.prompt, PlacedPrompt):
        raise ParameterError(
            "vLLM does not take a prompt that is already laid out (markup): answer it with KVEngine"
        )
    if not isinstance(asked.policy, str):
        raise ParameterError(f"policy {asked.policy}: expected a name such as 'gradual:spread=0.8'")
    for name, why in _REFUSED.items():
        value = getattr(asked, name)
        if value is not None and value is not False:
            raise ParameterError(
                f"{name.removesuffix('_policy')} {shown(value)}: {why}; leave it out, or answer "
                "with KVEngine"
            )
    asked.recompute.choice()


def _finish(reason: str | None) -> FinishReason:
    return "stop" if reason == "stop" else "timeout" if reason == "timeout" else "length"


def _report(last: Piece, params: RequestParams, num_prompt: int, num_layers: int) -> FusionReport:
    """Return the server's report, or one from the engine's own count of cached tokens."""
    given: Mapping[str, Any] | None = (last.said or {}).get("report")
    if given is not None:
        known = {field.name for field in fields(FusionReport)}
        values = {name: value for name, value in given.items() if name in known}
        return FusionReport(**values | {"rows_by_layer": tuple(values["rows_by_layer"])})
    because = (last.said or {}).get("computed_because")
    num_cached = 0 if because else min(last.num_cached, num_prompt - 1)
    return FusionReport(
        policy=str(params.policy),
        num_tokens=num_prompt,
        num_exact=0,
        num_reused=num_cached if params.reuse else 0,
        num_recomputed=0,
        num_fresh=num_prompt - (num_cached if params.reuse else 0),
        num_chunks=0,
        bytes_loaded=0,
        seconds={},
        rows_by_layer=(num_prompt - num_cached,) * num_layers,
        misses={because: 1} if because else {},
    )


# -- settings of adapters ------------------------------------------------------------------------

_NOT_TAKEN = ("schemas", "device", *OF_ENGINES)
_started: dict[str, InProcess] = {}
_starting = threading.Lock()


class VLLMSettings(EngineSettings):
    """Parameters of a language model that answers through vLLM.

    Attributes
    ----------
    base_url
        Address of a server that ``kvrag serve --engine vllm`` has started, such as
        ``http://127.0.0.1:8000/v1``; None starts vLLM in this process at the first call, once for
        all objects with the same index and arguments.
    engine_args
        Further arguments of ``vllm.LLM`` if it is started in this process.
    any_version
        Whether to accept an untested version of a vLLM started in this process.

    Notes
    -----
    ``links``, ``schemas``, ``device``, ``ttft``, ``eviction``, ``session_bytes``,
    ``session_store_bytes``, ``store_patience`` and ``never_slower`` are refused: vLLM has one row
    per token, supports no gaps between positions, chooses its own device, loads records whole,
    keeps all keys, has its own cache, and takes what is stored.
    """

    base_url: str | None = None
    engine_args: dict[str, Any] = Field(default_factory=dict)
    any_version: bool = False

    @model_validator(mode="after")
    def _as_vllm_takes_them(self) -> Self:
        Recompute(self.policy, self.ratio, self.boundary_tokens).choice()
        usual = type(self).model_fields
        is_given = make_eviction(self.eviction) is not None or any(
            getattr(self, name) != usual[name].get_default(call_default_factory=True)
            for name in _NOT_TAKEN
            if name not in ("eviction", "links")
        )
        if self.links not in (None, "off") or is_given:
            raise ParameterError(f"vLLM takes no {', '.join(_NOT_TAKEN)}; leave them out")
        if self.base_url is not None and self.engine_args:
            raise ParameterError(
                "engine_args are for a vLLM started in this process: leave out base_url"
            )
        return self

    def engine(self, model: str | None = None) -> Engine:
        """Return the engine that answers; it starts or contacts vLLM at the first prompt."""
        index = shared_index(self.index)
        name = model or self.model
        engine = self._engines.get(name)
        if engine is None or engine.index is not index:
            engine = self._engines[name] = VLLMEngine(index, lambda: self._connect(name))
        return engine

    def _connect(self, model: str | None) -> Transport:
        if self.base_url is not None:
            return HTTPServer(self.base_url, model=model)
        settings = ConnectorSettings(
            place_of(shared_index(self.index)), any_version=self.any_version
        )
        return start_engine(settings, {"model": model, **self.engine_args})


def start_engine(settings: ConnectorSettings, engine_args: dict[str, Any]) -> InProcess:
    """Return the process's engine for these settings, and start it if there is none.

    Parameters
    ----------
    settings
        The connector's settings.
    engine_args
        Arguments of ``vllm.LLM``; None values are left out.

    Raises
    ------
    EngineVersionError
        If vLLM is not installed, or its version was not tested.
    """
    require_tested(any_version=settings.any_version)
    given = {name: value for name, value in engine_args.items() if value is not None}
    options = {**engine_options(settings), **given}
    key = json.dumps(options, sort_keys=True, default=str)
    with _starting:
        if key not in _started:
            from vllm import LLM

            _started[key] = InProcess(LLM(**options))
        return _started[key]
