"""Ollama's API: its requests as chat requests, its answers as lines of JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import FastAPI, Request
from pydantic import BaseModel, Field, PrivateAttr, create_model, field_validator, model_validator
from starlette.responses import JSONResponse, Response

import kvrag
from kvrag.engine.answer import Answer, AnswerDelta
from kvrag.engine.options import MAX_LOGPROBS
from kvrag.llms.tool_calls import Piece
from kvrag.server import requests as q
from kvrag.server import responses as r
from kvrag.server.problems import RequestError
from kvrag.server.service import Service
from kvrag.server.shapes import ChatShape, finish_of

# Options that say how Ollama's own runner works; an answer does not depend on them.
_OF_THE_RUNNER = frozenset(
    {
        *("numa", "num_ctx", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "num_keep"),
        *("logits_all", "vocab_only", "use_mmap", "use_mlock", "embedding_only", "num_thread"),
    }
)
# Ways of sampling that kvrag has not, with the values that turn them off.
_TURNED_OFF: dict[str, tuple[Any, ...]] = {
    "mirostat": (0,),
    "tfs_z": (1, 0),
    "typical_p": (1, 0),
    "penalize_newline": (True, False),
}
_MIROSTATS = ("mirostat_tau", "mirostat_eta")  # nothing without it
_Name = Annotated[str, Field(max_length=q.MAX_NAME)]
_Nothing = Annotated[list[str] | None, Field(max_length=0)]


# kvrag's options by Ollama's names; a negative seed is Ollama's own.
_FIELDS = {name: field for name, field in q.SAMPLING_FIELDS.items() if name != "seed"}
_FIELDS["repeat_penalty"] = _FIELDS.pop("repetition_penalty")
if TYPE_CHECKING:
    _Sampling = q.Strict
else:
    _Sampling = create_model("_Sampling", __base__=q.Strict, **_FIELDS)


class OllamaOptions(_Sampling):
    """``options``: how to sample.

    Attributes
    ----------
    num_predict
        Most tokens of the answer; negative: the server's default.
    seed
        Negative: a new one for each answer.
    repeat_last_n
        Which tokens `repeat_penalty` covers: here always all, which is -1.
    """

    repeat_last_n: int | None = None
    seed: int | None = Field(default=None, le=2**53 - 1)
    num_predict: int | None = Field(default=None, le=q.MAX_TOKENS)
    stop: str | list[str] | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_what_changes_nothing(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        kept = {}
        for name, value in given.items():
            neutral = _TURNED_OFF.get(name)
            if neutral is not None and value is not None and value not in neutral:
                raise ValueError(f"{name}: this server does not sample so; leave it out")
            if neutral is None and name not in _OF_THE_RUNNER and name not in _MIROSTATS:
                kept[name] = value
        return kept

    @model_validator(mode="after")
    def _penalty_covers_all(self) -> OllamaOptions:
        penalty = self.model_dump()["repeat_penalty"]
        if self.repeat_last_n not in (None, -1) and penalty not in (None, 1):
            raise ValueError(
                "repeat_last_n: here repeat_penalty covers the whole prompt and answer; set it to "
                "-1, or leave it out"
            )
        return self

    @property
    def sampling(self) -> dict[str, Any]:
        """The same fields of a chat request."""
        given = self.model_dump(exclude={"repeat_last_n", "num_predict", "seed"})
        penalty = given.pop("repeat_penalty")
        most, seed = self.num_predict, self.seed
        return given | {
            "repetition_penalty": penalty,
            "max_tokens": None if most is None or most < 0 else most,
            "seed": None if seed is None or seed < 0 else seed,
        }


class OfOllama(q.Strict):
    """The fields that all of Ollama's requests share."""

    model: str = Field(max_length=500)
    # How long an idle model stays in memory: here always.
    keep_alive: str | float | None = None
    options: OllamaOptions = OllamaOptions()

    @field_validator("model", mode="after")
    @classmethod
    def _without_a_tag(cls, name: str) -> str:
        return name.removesuffix(":latest")

    @field_validator("options", mode="before")
    @classmethod
    def _no_options(cls, given: Any) -> Any:
        return {} if given is None else given


class Answered(OfOllama):
    """The fields of requests for answers."""

    stream: bool | None = None
    format: Literal["", "json"] | q.Object | None = None
    think: q.False_ = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    kvrag: q.KVRagOptions = q.KVRagOptions()

    _chat: q.ChatRequest | None = PrivateAttr(default=None)

    @property
    def chat(self) -> q.ChatRequest | None:
        """The same request for ``/v1/chat/completions``.

        None: it asks for no answer, only that the model be in memory.
        """
        return self._chat

    def _messages(self) -> list[dict[str, Any]]:
        raise NotImplementedError

    @model_validator(mode="after")
    def _is_a_chat_request(self) -> Answered:
        if messages := self._messages():
            self._chat = self._valid(q.ChatRequest, messages=messages, tools=self._tools())
        return self

    def _tools(self) -> list[dict[str, Any]] | None:
        return None

    def _valid(self, kind: Any, **fields: Any) -> Any:
        form: dict[str, Any] | None = None
        if self.format == "json":
            form = {"type": "json_object"}
        elif self.format:
            named = {"name": "answer", "schema": self.format}
            form = {"type": "json_schema", "json_schema": named}
        if kind is q.ChatRequest:
            fields |= {"response_format": form, "top_logprobs": self.top_logprobs}
            fields["logprobs"] = self.logprobs
        given = {**self.options.sampling, **fields, "model": self.model, "kvrag": self.kvrag}
        return q.of_other_form(kind, given | {"stream": self.stream is not False})


class OllamaFunction(q.Strict):
    """The function of an earlier call."""

    name: _Name
    arguments: q.Object
    index: int | None = None


class OllamaCall(q.Strict):
    """A call in an earlier answer."""

    function: OllamaFunction
    id: _Name | None = None
    type: Literal["function"] | None = None


class OllamaMessage(q.Strict):
    """A message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    images: _Nothing = None
    tool_calls: list[OllamaCall] | None = Field(default=None, max_length=q.MAX_TOOLS)
    tool_name: _Name | None = None
    tool_call_id: _Name | None = None
    # The model does not see it again.
    thinking: str | None = None


class OllamaChat(Answered):
    """The body of ``POST /api/chat``."""

    messages: Annotated[
        list[OllamaMessage] | None, Field(max_length=q.MAX_MESSAGES, fail_fast=True), q.few_pieces
    ] = None
    tools: Annotated[list[q.Tool], Field(max_length=q.MAX_TOOLS, fail_fast=True)] | None = None

    def _messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        called: list[dict[str, Any]] = []  # by the last message that calls, without their results
        number = 0
        for one in self.messages or ():
            turn: dict[str, Any] = {"role": one.role, "content": one.content or ""}
            if one.tool_calls:
                turn["tool_calls"] = []
                for call in one.tool_calls:
                    number += 1
                    arguments = json.dumps(call.function.arguments, ensure_ascii=False)
                    function = {"name": call.function.name, "arguments": arguments}
                    told = {"id": call.id or f"call_{number}", "type": "function"}
                    turn["tool_calls"].append({**told, "function": function})
                called = [*turn["tool_calls"]]
            if one.role == "tool":
                # Ollama's own results have no id, only a name, or not even that.
                of = next((call for call in called if _is_of(one, call)), None)
                if of is not None:
                    called.remove(of)
                turn["tool_call_id"] = one.tool_call_id or (of["id"] if of else "call_0")
                turn["name"] = one.tool_name
            messages.append(turn)
        return messages

    def _tools(self) -> list[dict[str, Any]] | None:
        return [one.model_dump() for one in self.tools or ()] or None


def _is_of(result: OllamaMessage, call: dict[str, Any]) -> bool:
    if result.tool_call_id is not None:
        return bool(result.tool_call_id == call["id"])
    return result.tool_name in (None, call["function"]["name"])


class OllamaGenerate(Answered):
    """The body of ``POST /api/generate``."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    suffix: Literal[""] | None = None
    template: Literal[""] | None = None
    images: _Nothing = None
    context: Annotated[list[int] | None, Field(max_length=0)] = None

    _completion: q.CompletionRequest = PrivateAttr()

    @property
    def completion(self) -> q.CompletionRequest:
        """The same request for ``/v1/completions``: the prompt is what the model reads."""
        return self._completion

    def _messages(self) -> list[dict[str, Any]]:
        if not self.prompt:
            return []
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": self.prompt}]

    @model_validator(mode="after")
    def _is_a_completion(self) -> OllamaGenerate:
        if self.raw and self.prompt:
            if self.system or self.format:
                raise ValueError("raw: a raw prompt has no system text and no format; leave it out")
            num = (self.top_logprobs or 0) if self.logprobs else None
            self._completion = self._valid(q.CompletionRequest, prompt=self.prompt, logprobs=num)
        return self


class OllamaEmbed(OfOllama):
    """The body of ``POST /api/embed``. A long text is read by windows, whatever `truncate` says."""

    input: str | Annotated[list[str], Field(max_length=q.MAX_INPUTS, fail_fast=True)]
    truncate: bool | None = None
    dimensions: int | None = Field(default=None, ge=1, le=q.MAX_TOKENS)


class OllamaEmbedding(OfOllama):
    """The body of ``POST /api/embeddings``, the older form for one text."""

    prompt: str


class OllamaShow(q.Strict):
    """The body of ``POST /api/show``."""

    model: str = Field(max_length=500)
    verbose: bool | None = None
    system: None = None
    template: None = None
    options: None = None


class LinesShape(ChatShape):
    """An answer as Ollama writes it: lines of JSON, of which the last has the figures."""

    media_type = "application/x-ndjson"
    ending = ""
    ping = ""

    def written(self, body: dict[str, Any]) -> str:
        """Return a body as a line."""
        return json.dumps(body, ensure_ascii=False, separators=(",", ":")) + "\n"

    def body(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """Return the whole answer."""
        (answer,) = answers
        said = self._parsed(0, AnswerDelta(answer.text, answer, answer.logprobs))
        return self._line(said, answer.logprobs) | self._figures(answer)

    def events(self, number: int, delta: AnswerDelta) -> Iterator[dict[str, Any]]:
        """Yield the line for a piece of the answer, if it says anything."""
        said = self._parsed(number, delta)
        if said.text or said.calls or delta.logprobs:
            yield self._line(said, delta.logprobs)

    def closing(self, answers: Sequence[Answer]) -> Iterator[dict[str, Any]]:
        """Yield the last line."""
        (answer,) = answers
        yield self._line(Piece(""), ()) | self._figures(answer)

    def failure(self, problem: RequestError) -> Iterator[dict[str, Any]]:
        """Yield the line of a stream that fails."""
        yield {"error": problem.message}

    def _line(self, said: Piece, tokens: Any) -> dict[str, Any]:
        line = {"model": self._asked.model, "created_at": _now(), **self._said(said)}
        if likely := self._likely(tokens):
            line["logprobs"] = [one.model_dump(mode="json") for one in likely.content]
        return line | {"done": False}

    def _said(self, said: Piece) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": said.text}
        if said.calls:
            message["tool_calls"] = [
                {"id": one.id, "function": {"name": one.name, "arguments": json.loads(one.json)}}
                for one in said.calls
            ]
        return {"message": message}

    def _figures(self, answer: Answer) -> dict[str, Any]:
        total, first = (int(one * 1e9) for one in (answer.total_seconds, answer.ttft_seconds))
        found: dict[str, Any] = {
            "done": True,
            "done_reason": finish_of(answer),
            "total_duration": total,
            "load_duration": 0,
            "prompt_eval_count": answer.usage.prompt_tokens,
            "prompt_eval_duration": first,
            "eval_count": answer.usage.completion_tokens,
            "eval_duration": total - first,
        }
        if self._asked.kvrag.report:
            found["kvrag"] = self._details([answer]).model_dump(mode="json")
        return found


class GeneratedShape(LinesShape):
    """The answer to ``/api/generate``."""

    def _said(self, said: Piece) -> dict[str, Any]:
        return {"response": said.text}


class OllamaError(BaseModel):
    """The body of an error."""

    error: str


_ERRORS = {status: {**told, "model": OllamaError} for status, told in r.ERRORS.items()}
_ANSWERS = {
    200: {
        "description": "The answer; a stream is lines of JSON.",
        "content": {
            "application/json": {"schema": {"type": "object"}},
            "application/x-ndjson": {"schema": {"type": "string"}},
        },
    },
    **_ERRORS,
}


def add_ollama(app: FastAPI, service: Service) -> None:
    """Add the routes of Ollama's API that ask; those that change models are not here."""

    @app.post("/api/chat", responses=_ANSWERS)
    async def chat(asked: OllamaChat, http: Request) -> Response:
        """Answer a conversation."""
        if asked.chat is None:
            return _loaded(service, asked, message={"role": "assistant", "content": ""})
        return await service.chat(asked.chat, http, partial(LinesShape, asked.chat))

    @app.post("/api/generate", responses=_ANSWERS)
    async def generate(asked: OllamaGenerate, http: Request) -> Response:
        """Answer a prompt."""
        if asked.chat is None:
            return _loaded(service, asked, response="")
        shape = partial(GeneratedShape, asked.chat)
        if asked.raw:
            return await service.complete(asked.completion, http, partial(shape, cites=False))
        return await service.chat(asked.chat, http, shape)

    @app.post("/api/embed", responses=_ERRORS)
    async def embed(asked: OllamaEmbed, http: Request) -> Response:
        """Return the vectors of texts."""
        started = time.perf_counter_ns()

        def written(vectors: Any, num_tokens: int) -> str:
            told = {
                "model": asked.model,
                "total_duration": time.perf_counter_ns() - started,
                "load_duration": 0,
                "prompt_eval_count": num_tokens,
            }
            # Text by text: one call for all would hold the interpreter's lock for seconds.
            rows = ",".join(json.dumps(one.tolist()) for one in vectors)
            return f'{json.dumps(told)[:-1]}, "embeddings": [{rows}]}}'

        if not asked.input:
            service.require(asked.model, service.names.embedding)
            return Response(written([], 0), media_type="application/json")
        wanted = q.EmbeddingRequest(**asked.model_dump(include={"model", "input", "dimensions"}))
        return await service.embed(wanted, http, written)

    @app.post("/api/embeddings", responses=_ERRORS)
    async def embeddings(asked: OllamaEmbedding, http: Request) -> Response:
        """Return the vector of one text."""
        wanted = q.EmbeddingRequest(model=asked.model, input=asked.prompt)
        return await service.embed(
            wanted, http, lambda vectors, _: json.dumps({"embedding": vectors[0].tolist()})
        )

    @app.get("/api/tags", responses=_ERRORS)
    async def tags() -> dict[str, Any]:
        """List the models."""
        found = await service.in_thread(lambda: _described(service))
        return {"models": [*found.values()]}

    @app.get("/api/ps", responses=_ERRORS)
    async def ps() -> dict[str, Any]:
        """List the models in memory: all."""
        return await tags()

    @app.post("/api/show", responses=_ERRORS)
    async def show(asked: OllamaShow) -> dict[str, Any]:
        """Describe a model."""
        name = asked.model.removesuffix(":latest")
        known = await service.in_thread(lambda: _described(service))
        if name not in known:
            raise RequestError(404, f"model {name!r} not found", code="model_not_found")
        return known[name] | _shown(service, name)

    @app.get("/api/version", responses=_ERRORS)
    async def version() -> dict[str, str]:
        """Return kvrag's version."""
        return {"version": kvrag.__version__}


def _loaded(service: Service, asked: Answered, **said: Any) -> Response:
    service.require(asked.model, service.names.model, service.names.rag)
    is_left = asked.keep_alive in (0, "0", "0s")
    told = {"done": True, "done_reason": "unload" if is_left else "load"}
    return JSONResponse({"model": asked.model, "created_at": _now(), **said, **told})


def _described(service: Service) -> dict[str, dict[str, Any]]:
    """Return what there is to say of each model, by name."""
    model = service.index.model
    weights = sum(tensor.nbytes for tensor in model.decoder.state_dict().values())
    digest, family = service.index.config.model_fingerprint, model.decoder.config.model_type
    found = {}
    for one in service.names.listed.data:
        # Nothing is known of the embedding's file.
        is_model = one.id in (service.names.model, service.names.rag)
        details = {
            "parent_model": "",
            "format": "kvrag",
            "family": family if is_model else "",
            "families": [family] if is_model else [],
            "parameter_size": "",
            "quantization_level": model.compute if is_model else "",
        }
        found[one.id] = {
            "name": one.id,
            "model": one.id,
            "modified_at": _time(one.created),
            "size": weights if is_model else 0,
            "digest": digest if is_model else "",
            "details": details,
        }
    return found


def _shown(service: Service, name: str) -> dict[str, Any]:
    model = service.index.model
    family = model.decoder.config.model_type
    answers = name in (service.names.model, service.names.rag)
    return {
        "modelfile": "",
        "parameters": "",
        "template": getattr(service.index.tokenizer, "chat_template", None) or "",
        "capabilities": ["completion", "tools"] if answers else ["embedding"],
        "model_info": {
            "general.architecture": family,
            f"{family}.context_length": model.max_positions,
            f"{family}.embedding_length": service.index.embedding.dim
            if not answers
            else model.decoder.config.hidden_size,
        },
    }


def _now() -> str:
    return _time(time.time())


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
