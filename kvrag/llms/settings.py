"""The constructor parameters and per-call parameters that all language-model classes share.

One pydantic model is mixed into LangChain's and LlamaIndex's classes, so that a parameter has
one name, one range and one meaning in both.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    field_serializer,
    field_validator,
    model_validator,
)

from kvrag.engine.answer import Answer, AnswerDelta
from kvrag.engine.base import Engine
from kvrag.engine.engine import KVEngine
from kvrag.engine.request import PlacedPrompt, Recompute, Request
from kvrag.engine.sampling import Sampling
from kvrag.engine.shared import shared_index
from kvrag.errors import IndexLockedError, KVRagError, ParameterError, StoreError
from kvrag.eviction.registry import make_eviction
from kvrag.fusion.controller import make_choice
from kvrag.fusion.policies import DEFAULT_POLICY
from kvrag.ingest.index import Index
from kvrag.ingest.prompt_tokens import tokenise_prompt
from kvrag.models.chat import PromptText
from kvrag.pml.engine import PMLEngine

INDEX_VARIABLE = "KVRAG_INDEX"
"""Environment variable that names the index folder where the constructor does not."""

PER_CALL = (
    "model",
    "policy",
    "ratio",
    "boundary_tokens",
    "temperature",
    "max_tokens",
    "top_p",
    "top_k",
    "repetition_penalty",
    "seed",
    "stop",
    "timeout",
)
"""Constructor parameters that a single call may replace."""

_RECOMPUTE = ("policy", "ratio", "boundary_tokens")
_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 2.0

T = TypeVar("T")
Prompt = str | Sequence[Mapping[str, str]]


def _index_from_environment() -> str:
    folder = os.environ.get(INDEX_VARIABLE)
    if not folder:
        raise ParameterError(
            f"no index: pass index='FOLDER' (made by 'kvrag ingest') or set {INDEX_VARIABLE}"
        )
    return folder


class EngineSettings(BaseModel):
    """Parameters of a kvrag language model; every one may change the answer or when it comes.

    Attributes
    ----------
    index
        The folder of an index, or an opened `kvrag.Index`. Taken from the environment variable
        ``KVRAG_INDEX`` if absent. Opened, and its model loaded, at the first call; classes given
        the same folder share both.
    model
        Where to take the model from (a folder or a hub name) if not from where the index says.
        It must be the model the index was made with; anything else raises IndexMismatchError.
    device
        Where the model runs, such as ``"cuda"``; None means the CPU.
    policy, ratio, boundary_tokens
        How much of the reused KV is recomputed; see `kvrag.KVEngine`.
    eviction
        What is forgotten while answers are written, as in ``"corm:window=256:recent=256"``; None
        keeps the full cache; see `kvrag.KVEngine`.
    links
        Link tokens put behind reused chunks: a file, or ``"off"``; None takes those of the model's
        folder; see `kvrag.KVEngine`.
    ttft
        Seconds to the first token that stored KV is streamed towards; None loads all of it; see
        `kvrag.KVEngine`.
    schemas
        Files of prompt markup schemas. A prompt string that is a ``<prompt>`` of one of them, as
        `PMLPromptTemplate` makes them, is answered from the schema's modules.
    temperature, top_p, top_k, repetition_penalty, seed
        Sampling; temperature 0 is greedy.
    max_tokens
        Tokens to generate at most.
    stop
        Texts before which the answer ends.
    timeout
        Seconds after which generation ends with what there is (finish reason "timeout").
    max_retries
        How often a call that fails before its first token because the store cannot be reached
        (StoreError) or the index is being written (IndexLockedError) is tried again, after 0.1,
        0.2, 0.4 ... seconds. A local model has nothing else to retry.

    Notes
    -----
    A pickled object names its index by the folder, and opens it again where it is loaded; a deep
    copy shares an opened index with the original.
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    index: Index | str | Path = Field(default_factory=_index_from_environment)
    model: str | None = None
    device: str | None = None
    policy: str = DEFAULT_POLICY
    ratio: float | None = Field(default=None, ge=0.0, le=1.0)
    boundary_tokens: int | None = Field(default=None, ge=1)
    eviction: str | None = None
    links: str | Path | None = None
    ttft: float | None = Field(default=None, gt=0.0, allow_inf_nan=False)
    schemas: list[str] = Field(default_factory=list)
    temperature: float = Field(default=0.0, ge=0.0)
    max_tokens: int = Field(default=256, ge=1)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=0)
    repetition_penalty: float = Field(default=1.0, gt=0.0)
    seed: int | None = None
    stop: list[str] | None = None
    timeout: float | None = Field(default=None, gt=0.0)
    max_retries: int = Field(default=2, ge=0)

    _engines: dict[str | None, Engine] = PrivateAttr(default_factory=dict)
    _markup: dict[str | None, PMLEngine] = PrivateAttr(default_factory=dict)

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
        # What only the engine would refuse is refused here, not at the first call.
        make_choice(self.policy, ratio=self.ratio, boundary_tokens=self.boundary_tokens)
        make_eviction(self.eviction)
        Sampling(self.temperature, self.top_p, self.top_k, self.repetition_penalty, self.seed)
        return self

    @field_serializer("index")
    def _index_as_path(self, value: Index | str | Path) -> str:
        return str(value.path if isinstance(value, Index) else value)

    def __getstate__(self) -> dict[Any, Any]:
        # A copy, since LlamaIndex deletes what it cannot pickle from the object it is asked about.
        light = self.model_copy(update={"index": self._index_as_path(self.index)})
        light._engines, light._markup = {}, {}
        state: dict[Any, Any] = super(EngineSettings, light).__getstate__()
        return state

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        memo = {} if memo is None else memo
        # Both hold locks and open files; an engine is made again at the next call.
        memo[id(self.index)] = self.index
        memo[id(self._engines)] = {}
        memo[id(self._markup)] = {}
        return super().__deepcopy__(memo)

    @property
    def model_name(self) -> str:
        """What the model is called: as constructed, or as the index records it."""
        if self.model is not None:
            return self.model
        index = shared_index(self.index)
        return index.config.model or index.model.name

    def call_values(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of all per-call parameters: the constructor's, replaced by `call`'s.

        Parameters
        ----------
        call
            What one call was given; ``stop=None`` and ``model=None`` mean "as constructed".

        Raises
        ------
        ParameterError
            When `call` holds a name that is not in `PER_CALL`, or a value outside its range.
        """
        unknown = sorted(set(call) - set(PER_CALL))
        if unknown:
            raise ParameterError(
                f"unknown parameter {', '.join(map(repr, unknown))}: "
                f"a call takes {', '.join(PER_CALL)}"
            )
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

    def answer(self, prompt: Prompt, call: Mapping[str, Any]) -> Answer:
        """Return the engine's answer to one prompt.

        Parameters
        ----------
        prompt
            The rendered prompt, or the turns of a conversation (role and content).
        call
            Per-call parameters, as the framework handed them on.
        """
        engine, request = self._prepare(call)
        return self._retrying(lambda: engine().generate(request(prompt)))

    def deltas(self, prompt: Prompt, call: Mapping[str, Any]) -> Iterator[AnswerDelta]:
        """Yield the engine's answer piece by piece; the last piece carries the whole answer."""
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
        """Return what opens the engine, and what makes a request of a prompt."""
        values = self.call_values(call)
        model, stop, timeout = (values.pop(name) for name in ("model", "stop", "timeout"))

        def engine() -> Engine:
            return self.engine(model)

        def request(prompt: Prompt) -> Request:
            placed = self._placed(prompt, engine())
            return Request(placed, stop=tuple(stop or ()), timeout_seconds=timeout, **values)

        return engine, request

    def engine(self, model: str | None = None) -> Engine:
        """Return the engine that answers, opening index and model if this is the first call."""
        model = model or self.model
        index = shared_index(self.index, model=model, device=self.device)
        engine = self._engines.get(model)
        if engine is None or engine.index is not index:
            # Two threads may both get here; their engines are interchangeable.
            engine = self._engines[model] = KVEngine(
                index, eviction=self.eviction, links=self.links, ttft=self.ttft
            )
        return engine

    def _placed(self, prompt: Prompt, engine: Engine) -> Prompt | PlacedPrompt:
        """Return a prompt of one of the schemas laid out, and any other as it is."""
        text = prompt
        if not isinstance(prompt, str) and len(prompt) == 1 and prompt[0]["role"] == "user":
            # Frameworks that talk to a chat model make a turn of whatever a template renders.
            text = prompt[0]["content"]
        if not (self.schemas and isinstance(text, str) and text.lstrip().startswith("<prompt")):
            return prompt
        name = next(known for known, one in self._engines.items() if one is engine)
        markup = self._markup.get(name)
        if markup is None or markup.engine is not engine:
            markup = PMLEngine(engine)
            for schema in self.schemas:
                markup.add(Path(schema))
            self._markup[name] = markup
        return markup.place(text)

    def context_window(self) -> int:
        """Return how many tokens prompt and answer may have together."""
        return shared_index(self.index).config.max_positions

    def token_ids(self, text: str) -> list[int]:
        """Return the model's token ids of `text`, without special tokens; loads no weights.

        As they are in a prompt: in that of a chat model all text is a message's, in which no
        control string is control (unless the index keeps them).
        """
        index = shared_index(self.index)
        if self._asks_in_messages() and index.control is not None:
            (tokens,) = index.control.documents([text])
        else:
            tokens = tokenise_prompt(index, PromptText(text, False))
        return list(tokens.token_ids)

    def _asks_in_messages(self) -> bool:
        """Whether prompts are messages for the chat template."""
        return False

    def _retrying(self, attempt: Callable[[], T]) -> T:
        for number in range(self.max_retries):
            try:
                return attempt()
            except (StoreError, IndexLockedError):
                time.sleep(min(_FIRST_PAUSE_SECONDS * 2**number, _LONGEST_PAUSE_SECONDS))
        return attempt()

    def identity(self) -> dict[str, Any]:
        """Return everything that changes an answer, without loading weights.

        LangChain's caches key on it. What the index records is left out while the index cannot
        be opened, so that an object can be printed before its index exists.
        """
        identity: dict[str, Any] = {
            name: getattr(self, name) for name in PER_CALL if name not in ("stop", "timeout")
        }
        # LangChain overwrites "stop" with the call's own, which may be None.
        identity["default_stop"] = self.stop
        identity["timeout"] = self.timeout
        identity["device"] = self.device
        identity["links"] = self.links
        identity["ttft"] = self.ttft
        identity["eviction"] = self.eviction
        identity["schemas"] = [_file_digest(schema) for schema in self.schemas]
        try:
            identity |= recorded_identity(shared_index(self.index))
            # What they are, not where: the model's folder may bring some, and a file may change.
            identity["links"] = self.engine().links_digest
        except (KVRagError, OSError):
            identity["index"] = str(self.index)
        return identity


def _file_digest(name: str) -> str:
    """Return what tells a file's contents, or its name where it cannot be read."""
    try:
        return hashlib.blake2b(Path(name).read_bytes(), digest_size=20).hexdigest()
    except OSError:
        return name


def recorded_identity(index: Index) -> dict[str, str]:
    """Return what an index fixes of the answers given from it."""
    return {
        "index": str(index.path),
        "store": index.store.url,
        "model_fingerprint": index.config.model_fingerprint,
        "tokenizer_fingerprint": index.config.tokenizer_fingerprint,
        "dtype": index.config.dtype,
        "codec": index.config.codec,
        "control_tokens": index.config.control_tokens,
    }
