"""Constructor and per-call parameters that all language-model classes share.

One pydantic model is a base of LangChain's and LlamaIndex's classes, so that a parameter has
one name, one range and one meaning in both.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import os
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import Field as Field_
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationInfo,
    create_model,
    field_serializer,
    field_validator,
    model_validator,
)

from kvrag import arguments
from kvrag.engine.answer import Answer, AnswerDelta
from kvrag.engine.base import Engine
from kvrag.engine.constraint import Constraint
from kvrag.engine.engine import KVEngine
from kvrag.engine.options import DEFAULT_MAX_TOKENS, AnswerOptions, EngineOptions, everywhere
from kvrag.engine.request import PlacedPrompt, Recompute, Request
from kvrag.engine.shared import place_of, shared_index
from kvrag.errors import IndexLockedError, KVRagError, ParameterError, StoreError
from kvrag.fusion.policies import DEFAULT_POLICY
from kvrag.ingest.index import Index
from kvrag.ingest.prompt_tokens import tokenise_prompt
from kvrag.llms.tool_calls import ToolCallParser, shape
from kvrag.models.chat import PromptText
from kvrag.models.tools import tool_format
from kvrag.optiontable import attributes, checked, kind_of
from kvrag.pml.engine import PMLEngine
from kvrag.regularfile import read_regular

INDEX_VARIABLE = "KVRAG_INDEX"
"""Environment variable that names the index folder if the constructor does not."""

_TABLES = AnswerOptions, EngineOptions
_OPTIONS = everywhere(*_TABLES)
_ENGINE = tuple(everywhere(EngineOptions))
_OF_REQUESTS = tuple(everywhere(AnswerOptions))
OF_ENGINES = (*_ENGINE, "eviction", "ttft")
"""Constructor parameters that make an engine."""
_RECOMPUTE = tuple(one.name for one in fields(Recompute))

PER_CALL = (
    *("model", *(name for name in _OF_REQUESTS if name not in OF_ENGINES)),
    *("stop", "timeout", "response_format"),
)
"""Constructor parameters that a single call may replace."""

TOOLS = ("tools", "tool_choice")
"""Parameters that only a call has (`kvrag.llms.tool_calls.shape`); they need messages."""

# What an index records that changes its answers.
_RECORDED = ("model_fingerprint", "tokenizer_fingerprint", "dtype", "codec", "control_tokens")
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 2.0

T = TypeVar("T")
Prompt = str | Sequence[Mapping[str, Any]]


def _index_from_environment() -> str:
    if not (folder := os.environ.get(INDEX_VARIABLE)):
        raise ParameterError(
            f"no index: pass index='FOLDER' (made by 'kvrag ingest') or set {INDEX_VARIABLE}"
        )
    return folder


def _field(one: Field_[Any]) -> tuple[Any, Any]:
    """Return an option as a field of pydantic; an engine's default is the field's."""
    usual = {"policy": DEFAULT_POLICY, "max_tokens": DEFAULT_MAX_TOKENS}
    # Its values are checked by `checked`, with their bounds.
    kind: Any = str | Path if one.name == "links" else kind_of(one)
    if one.name in usual:
        return kind, usual[one.name]
    return (kind | None if one.default is None else kind), one.default


if TYPE_CHECKING:

    class _FromTable(BaseModel):
        policy: str
        ratio: float | None
        boundary_tokens: int | None
        eviction: str | None
        ttft: float | None
        max_tokens: int
        links: str | Path | None
else:
    _FromTable = create_model("_FromTable", **{name: _field(x) for name, x in _OPTIONS.items()})


class EngineSettings(_FromTable):
    """Parameters of a kvrag language model; each may change the answer or its timing.

    Attributes
    ----------
    index
        The folder of an index, or an opened `kvrag.Index`. The default is the environment
        variable ``KVRAG_INDEX``. The first call opens the index and loads its model; objects with
        the same folder share both.
    model
        The folder or hub name to load the model from; None uses the model recorded in the index.
        It must be the index's model; any other raises IndexMismatchError.
    device
        Where the model runs, such as ``"cuda"``; None means the CPU.
    schemas
        Files of prompt markup schemas. A prompt string that is a ``<prompt>`` of one of them, as
        `PMLPromptTemplate` renders it, is answered from the schema's modules.
    stop
        Strings that end the answer; the answer does not contain them.
    timeout
        Seconds after which generation stops and the answer is cut (finish reason "timeout").
    response_format
        The form that answers must have: as in OpenAI's API, or a `kvrag.Constraint`; see
        `kvrag.Constraint.of`. None allows any text.
    max_retries
        How often to retry a call that fails before its first token because the store cannot be
        reached (StoreError) or the index is being written (IndexLockedError). The retries follow
        after 0.1, 0.2, 0.4 ... seconds. Other errors are not retried.

    Notes
    -----
    A pickled object stores its index's folder, and opens the index again after it is loaded. A
    deep copy shares an opened index with the original.
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    index: Index | str | Path = Field(default_factory=_index_from_environment)
    model: str | None = None
    device: str | None = None
    schemas: list[str] = Field(default_factory=list)
    stop: list[str] | None = None
    timeout: float | None = Field(default=None, gt=0.0)
    response_format: dict[str, Any] | Constraint | None = None
    max_retries: int = Field(default=2, ge=0)

    # By the model and what else each was made with: a copy, and a parameter that is set later, may
    # differ.
    _engines: dict[Any, Engine] = PrivateAttr(default_factory=dict)
    _markup: dict[Any, PMLEngine] = PrivateAttr(default_factory=dict)

    # Otherwise pydantic would take True for 1, and "0.5" for 0.5.
    @field_validator(*_OPTIONS, mode="before")
    @classmethod
    def _as_an_engine_takes_them(cls, value: Any, info: ValidationInfo) -> Any:
        return checked(_OPTIONS[str(info.field_name)], value)

    @field_validator("timeout", "max_retries", mode="before")
    @classmethod
    def _numbers_are_numbers(cls, value: Any, info: ValidationInfo) -> float | None:
        check = arguments.whole if info.field_name == "max_retries" else arguments.number
        return None if value is None else check(value, str(info.field_name))

    @field_validator("schemas", mode="before")
    @classmethod
    def _schemas_as_text(cls, value: Any) -> Any:
        return [str(one) for one in ([value] if isinstance(value, str | Path) else value)]

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop_is_a_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("index", "links", mode="after")
    @classmethod
    def _path_as_text(cls, value: Index | str | Path | None) -> Index | str | None:
        return str(value) if isinstance(value, Path) else value

    @model_validator(mode="after")
    def _as_the_engine_takes_them(self) -> Self:
        # The engine would reject wrong values only at the first call.
        Request(
            "",
            stop=tuple(self.stop or ()),
            timeout_seconds=self.timeout,
            constraint=Constraint.of(self.response_format),
            **{name: getattr(self, name) for name in _OF_REQUESTS},
        )
        return self

    @field_serializer("index")
    def _index_as_place(self, value: Index | str | Path) -> str:
        return place_of(value)

    def __getstate__(self) -> dict[Any, Any]:
        # A copy, since LlamaIndex deletes what it cannot pickle from the object itself.
        light = self.model_copy(update={"index": place_of(self.index)})
        light._engines, light._markup = {}, {}
        state: dict[Any, Any] = super(EngineSettings, light).__getstate__()
        return state

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        memo = {} if memo is None else memo
        # Index and engines hold locks and open files; the next call makes new engines.
        memo[id(self.index)] = self.index
        memo[id(self._engines)] = {}
        memo[id(self._markup)] = {}
        return super().__deepcopy__(memo)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with other values, which are not checked; a deep one has own engines."""
        # With an update, Pydantic's deep copy does not ask `__deepcopy__`.
        copied = copy.deepcopy(self) if deep else self
        return super(EngineSettings, copied).model_copy(update=update)

    @property
    def model_name(self) -> str:
        """The model's name: the constructor's, or the one that the index records."""
        if self.model is not None:
            return self.model
        index = shared_index(self.index)
        return index.config.model or index.model.name

    def call_values(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of all per-call parameters: the call's, otherwise the constructor's.

        Parameters
        ----------
        call
            The parameters of one call; for ``stop`` and ``model``, None means the constructor's.

        Raises
        ------
        ParameterError
            When `call` holds a name that is not in `PER_CALL`, or a value outside its range.
        """
        call = {name: value for name, value in call.items() if name not in TOOLS}
        arguments.only(call, PER_CALL, "a call")
        values = {name: getattr(self, name) for name in PER_CALL}
        meant = Recompute(*(call.get(name) for name in _RECOMPUTE)).over(
            Recompute(self.policy, self.ratio, self.boundary_tokens)
        )
        for name, value in call.items():
            if value is not None or name not in ("stop", "model"):
                values[name] = value
        values |= {name: getattr(meant, name) for name in _RECOMPUTE}
        try:
            checked = EngineSettings(index="", **values)
        except ValueError as error:
            raise ParameterError(str(error)) from error
        return {name: getattr(checked, name) for name in PER_CALL}

    def answers(self, prompts: Sequence[Prompt], call: Mapping[str, Any]) -> list[Answer]:
        """Return the engine's answers to prompts, written together.

        Parameters
        ----------
        prompts
            Rendered prompts, or the turns of conversations (role and content).
        call
            Per-call parameters, as the framework passes them.
        """
        engine, request = self._prepare(call)
        done: dict[int, Answer] = {}

        def attempt() -> None:
            left = [number for number in range(len(prompts)) if number not in done]
            requests = [request(prompts[number]) for number in left]
            outcomes = engine().generate_batch(requests, return_exceptions=True)
            found = list(zip(left, outcomes, strict=True))
            done.update((number, one) for number, one in found if isinstance(one, Answer))
            for _, one in found:
                if isinstance(one, Exception):
                    raise one

        self._retrying(attempt)
        return [done[number] for number in range(len(prompts))]

    async def aanswer(self, prompt: Prompt, call: Mapping[str, Any]) -> Answer:
        """Return the answer to one prompt while the event loop runs on; see `answers`."""
        async with aclosing(self.adeltas(prompt, call)) as deltas:
            async for delta in deltas:
                if delta.answer is not None:
                    return delta.answer
        raise AssertionError("the last piece carries the answer")

    async def adeltas(
        self, prompt: Prompt, call: Mapping[str, Any]
    ) -> AsyncGenerator[AnswerDelta, None]:
        """Yield an answer piece by piece while the event loop runs on; see `deltas`.

        Only opening the engine takes a thread. Answers that wait at the same time are written
        together; one that nobody waits for any more leaves the batch at the next step.
        """
        engine, request = self._prepare(call)
        for number in range(self.max_retries + 1):
            opened, asked = await asyncio.to_thread(lambda: (engine(), request(prompt)))
            async with aclosing(opened.astream(asked)) as stream:
                try:
                    first = await anext(stream)
                except (StoreError, IndexLockedError):
                    if number == self.max_retries:
                        raise
                else:
                    yield first
                    async for delta in stream:
                        yield delta
                    return
            await asyncio.sleep(_pause_seconds(number))

    def deltas(self, prompt: Prompt, call: Mapping[str, Any]) -> Iterator[AnswerDelta]:
        """Yield the engine's answer piece by piece; the last piece includes the whole answer."""
        engine, request = self._prepare(call)

        def start() -> tuple[AnswerDelta, Iterator[AnswerDelta]]:
            stream = iter(engine().stream(request(prompt)))
            return next(stream), stream

        first, rest = self._retrying(start)
        yield first
        yield from rest

    def _prepare(
        self, call: Mapping[str, Any]
    ) -> tuple[Callable[[], Engine], Callable[[Prompt], Request]]:
        """Return a function that opens the engine, and one that makes a request from a prompt."""
        values = self.call_values(call)
        model, stop, timeout, form = (
            values.pop(name) for name in ("model", "stop", "timeout", "response_format")
        )

        def engine() -> Engine:
            return self.engine(model)

        def request(prompt: Prompt) -> Request:
            placed = self._placed(prompt, engine())
            tokenizer = engine().index.tokenizer
            asked = shape(tokenizer, call.get("tools"), call.get("tool_choice"), form)
            return Request(
                placed,
                stop=tuple(stop or ()),
                timeout_seconds=timeout,
                tools=asked.tools,
                constraint=asked.constraint,
                **values,
            )

        return engine, request

    def parser(self, call: Mapping[str, Any]) -> ToolCallParser:
        """Return what finds calls of tools in a call's answer."""
        if not call.get("tools") or call.get("tool_choice") == "none":
            return ToolCallParser(None)
        return ToolCallParser(tool_format(shared_index(self.index).tokenizer))

    def engine(self, model: str | None = None) -> Engine:
        """Return the engine; the first call opens the index and loads the model."""
        model = model or self.model
        index = shared_index(self.index, model=model, device=self.device)
        values = {name: getattr(self, name) for name in OF_ENGINES}
        key = (model, *values.values())
        engine = self._engines.get(key)
        if engine is None or engine.index is not index:
            # Two threads may both get here; their engines are interchangeable.
            given = {name: value for name, value in values.items() if value is not None}
            engine = self._engines[key] = KVEngine(index, **given)
        return engine

    def _placed(self, prompt: Prompt, engine: Engine) -> Prompt | PlacedPrompt:
        """Lay out a prompt of one of the schemas; return any other prompt unchanged."""
        text: Any = prompt
        match prompt:  # which may be of any type: the Request refuses wrong ones
            case [{"role": "user", "content": content}]:
                # For a chat model, frameworks put a rendered template into a user turn.
                text = content
        if not (self.schemas and isinstance(text, str) and text.lstrip().startswith("<prompt")):
            return prompt
        made = next(known for known, one in self._engines.items() if one is engine)
        key = (made, *self.schemas)
        markup = self._markup.get(key)
        if markup is None or markup.engine is not engine:
            markup = PMLEngine(engine)
            for schema in self.schemas:
                markup.add(Path(schema))
            self._markup[key] = markup
        return markup.place(text)

    def context_window(self) -> int:
        """Return the maximum number of tokens of prompt and answer together."""
        return shared_index(self.index).config.max_positions

    def token_ids(self, text: str) -> list[int]:
        """Return the model's token ids of `text`, without special tokens; loads no weights.

        The ids are those in a prompt. In a chat model's prompt all text belongs to messages, where
        control strings are plain text (unless the index keeps them).
        """
        index = shared_index(self.index)
        if self._asks_in_messages() and index.control is not None:
            (tokens,) = index.control.documents([text])
        else:
            tokens = tokenise_prompt(index, PromptText(text, False))
        return list(tokens.token_ids)

    def _asks_in_messages(self) -> bool:
        """Return whether prompts are messages for the chat template."""
        return False

    def _retrying(self, attempt: Callable[[], T]) -> T:
        for number in range(self.max_retries):
            try:
                return attempt()
            except (StoreError, IndexLockedError):
                time.sleep(_pause_seconds(number))
        return attempt()

    def identity(self) -> dict[str, Any]:
        """Return everything that changes an answer, without loading weights.

        LangChain's caches use it as their key. While the index cannot be opened, the values that
        it records are left out, so that an object can be printed before its index exists.
        """
        names = {*PER_CALL, "device", "links", "ttft", "eviction"} - {"stop"}
        identity: dict[str, Any] = {name: getattr(self, name) for name in sorted(names)}
        # LangChain overwrites "stop" with the call's value, which may be None.
        identity["default_stop"] = self.stop
        identity["schemas"] = [file_digest(schema) for schema in self.schemas]
        try:
            index = shared_index(self.index)
            identity |= {name: getattr(index.config, name) for name in _RECORDED}
            identity |= {"index": str(index.path), "store": index.store.url}
            # A digest, not a path: the model's folder may contain links, and a file may change.
            identity["links"] = self.engine().links_digest
        except (KVRagError, OSError):
            identity["index"] = str(self.index)
        return identity


EngineSettings.__doc__ = str(EngineSettings.__doc__).replace(
    "    schemas\n", f"{attributes(*_TABLES)}\n    schemas\n", 1
)


def _pause_seconds(number: int) -> float:
    return min(_FIRST_PAUSE_SECONDS * 2.0**number, _LONGEST_PAUSE_SECONDS)


def file_digest(name: str) -> str:
    """Return a digest of a file's contents, or its name if it cannot be read."""
    try:
        return hashlib.blake2b(read_regular(name), digest_size=20).hexdigest()
    except OSError:
        return name
