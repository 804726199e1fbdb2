"""OpenAI's Responses API: its requests as chat requests, its answers as items and events."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PrivateAttr, field_validator, model_validator

from kvrag.engine.answer import Answer, AnswerDelta
from kvrag.server import requests as q
from kvrag.server import responses as r
from kvrag.server.problems import RequestError
from kvrag.server.shapes import ChatShape, finish_of

Status = Literal["in_progress", "completed", "incomplete"]

_LOGPROBS = "message.output_text.logprobs"

_Name = Annotated[str, Field(max_length=q.MAX_NAME)]


class ItemPart(q.Strict):
    """A part of a message's content, or of a tool's output; perhaps of an earlier answer."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[q.Object] | None = None
    logprobs: list[q.Object] | None = None


_Content = (
    str | Annotated[list[ItemPart], Field(min_length=1, max_length=q.MAX_MESSAGES, fail_fast=True)]
)


class MessageItem(q.Strict):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: _Content
    id: _Name | None = None
    status: _Name | None = None
    phase: _Name | None = None

    def add_to(self, messages: list[dict[str, Any]]) -> None:
        messages.append({"role": self.role, "content": _text(self.content)})


class CallItem(q.Strict):
    """A call of a tool in an earlier answer."""

    type: Literal["function_call"]
    call_id: _Name
    name: _Name
    arguments: str
    id: _Name | None = None
    status: _Name | None = None
    caller: None = None
    namespace: None = None

    def add_to(self, messages: list[dict[str, Any]]) -> None:
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": None})
        function = {"name": self.name, "arguments": self.arguments}
        call = {"id": self.call_id, "type": "function", "function": function}
        messages[-1].setdefault("tool_calls", []).append(call)


class ResultItem(q.Strict):
    """What a call has returned."""

    type: Literal["function_call_output"]
    call_id: _Name
    output: _Content
    id: _Name | None = None
    status: _Name | None = None

    def add_to(self, messages: list[dict[str, Any]]) -> None:
        result = {"role": "tool", "tool_call_id": self.call_id, "content": _text(self.output)}
        messages.append(result)


class FunctionTool(q.Function):
    """A function that the model may call."""

    type: Literal["function"]


class NamedFunctionTool(q.NamedFunction):
    """The function that must be called."""

    type: Literal["function"]


class TextFormat(q.Strict):
    """The form of the text; the types ``regex`` and ``lark`` are kvrag's own."""

    type: Literal["text", "json_object", "json_schema", "regex", "lark"]
    name: _Name | None = None
    description: str | None = None
    schema_: q.Object | None = Field(default=None, alias="schema")
    strict: bool | None = None
    regex: str | None = None
    lark: str | None = None


class TextOptions(q.Strict):
    """``text``."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class EventOptions(q.Strict):
    """``stream_options``."""

    include_obfuscation: q.False_ = None


class NoReasoning(q.Strict):
    """``reasoning`` of a model that writes only its answer."""

    effort: Literal["none"] | None = None
    summary: None = None
    generate_summary: None = None


class ItemsRequest(q.Asked):
    """The body of ``POST /v1/responses``."""

    input: Annotated[
        str
        | Annotated[
            list[MessageItem | CallItem | ResultItem],
            Field(min_length=1, max_length=q.MAX_MESSAGES, fail_fast=True),
        ],
        q.few_pieces,
    ]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1, le=q.MAX_TOKENS)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    tools: Annotated[list[FunctionTool], Field(max_length=q.MAX_TOOLS, fail_fast=True)] | None = (
        None
    )
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionTool | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = Field(default=None, ge=1, le=q.MAX_TOKENS)
    text: TextOptions | None = None
    include: list[_Name] | None = Field(default=None, max_length=16)
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    stream_options: EventOptions | None = None
    previous_response_id: str | None = None
    truncation: Literal["disabled"] | None = None
    background: q.False_ = None
    reasoning: NoReasoning | None = None
    conversation: None = None
    prompt: None = None

    _chat: q.ChatRequest = PrivateAttr()

    @field_validator("previous_response_id", mode="after")
    @classmethod
    def _nothing_is_kept(cls, value: str | None) -> None:
        if value is not None:
            raise ValueError(
                "this server keeps no responses; send the earlier items in input instead"
            )

    @model_validator(mode="after")
    def _is_a_chat_request(self) -> Self:
        self._chat = q.of_other_form(q.ChatRequest, self._as_chat())
        return self

    @property
    def chat(self) -> q.ChatRequest:
        """The same request for ``/v1/chat/completions``."""
        return self._chat

    def _as_chat(self) -> dict[str, Any]:
        messages: list[dict[str, Any]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            messages.append({"role": "user", "content": self.input})
        else:
            for item in self.input:
                item.add_to(messages)
        tools = [one.model_dump(exclude={"type"}) for one in self.tools or ()]
        choice: Any = self.tool_choice
        if isinstance(choice, NamedFunctionTool):
            choice = {"type": "function", "function": {"name": choice.name}}
        told = _LOGPROBS in (self.include or ()) or bool(self.top_logprobs)
        return {
            "model": self.model,
            "messages": messages,
            "max_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "tools": [{"type": "function", "function": one} for one in tools] or None,
            "tool_choice": choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": self._form(),
            "logprobs": told or None,
            "top_logprobs": (self.top_logprobs or 0) if told else None,
            "stream": self.stream,
            "user": self.user,
            "kvrag": self.kvrag,
        }

    def _form(self) -> dict[str, Any] | None:
        form = None if self.text is None else self.text.format
        if form is None:
            return None
        given = form.model_dump(exclude_none=True, by_alias=True)
        if form.type == "json_schema":
            kind = given.pop("type")
            return {"type": kind, kind: given}
        return given


class ItemsShape(ChatShape):
    """An answer as a list of items, and a stream as events that build them up.

    Parameters
    ----------
    given
        The request.
    others
        See `ChatShape`.
    """

    ending = ""

    def __init__(self, given: ItemsRequest, *others: Any, **options: Any) -> None:
        super().__init__(given.chat, *others, **options)
        self._given = given
        self._id = f"resp_{secrets.token_hex(12)}"
        self._sequence = count()
        self._items: list[dict[str, Any]] = []
        self._is_open = False  # the last item, a message that more text may follow

    def body(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """Return the response with the whole answer."""
        (answer,) = answers
        for _ in self.events(0, AnswerDelta(answer.text, answer, answer.logprobs)):
            pass
        return self._response(answers)

    def opening(self) -> Iterator[dict[str, Any]]:
        """Yield what a stream begins with."""
        for kind in ("created", "in_progress"):
            yield self._event_of(kind, response=self._response())

    def events(self, number: int, delta: AnswerDelta) -> Iterator[dict[str, Any]]:
        """Yield the events for a piece of the answer."""
        said = self._parsed(number, delta)
        answer = delta.answer
        if said.text or delta.logprobs:
            yield from self._say(said.text, delta)
        for one in said.calls:
            if self._num_calls[number] == self._most_calls:
                break
            self._num_calls[number] += 1
            yield from self._close()
            yield from self._call(one.id, one.name, one.json)
        if answer is not None:
            if not self._items:
                yield from self._open()
            yield from self._close(answer)

    def closing(self, answers: Sequence[Answer]) -> Iterator[dict[str, Any]]:
        """Yield what a stream ends with."""
        response = self._response(answers)
        yield self._event_of(response["status"], response=response)

    def failure(self, problem: RequestError) -> Iterator[dict[str, Any]]:
        """Yield the events of a stream that fails."""
        error = problem.to_dict()["error"]
        named = {name: error[name] for name in ("code", "message", "param")}
        yield {"type": "error", **named, "sequence_number": next(self._sequence)}
        told = {"code": error["code"] or "server_error", "message": error["message"]}
        failed = self._response() | {"status": "failed", "error": told}
        yield self._event_of("failed", response=failed)

    def _open(self) -> Iterator[dict[str, Any]]:
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        item: dict[str, Any] = {"id": _new_id("msg"), "type": "message", "role": "assistant"}
        item |= {"content": [], "status": "in_progress"}
        self._items.append(item)
        self._is_open = True
        yield self._of_item("output_item.added", item=item)
        yield self._of_part("content_part.added", part=part)
        item["content"] = [part]

    def _say(self, text: str, delta: AnswerDelta) -> Iterator[dict[str, Any]]:
        if not self._is_open:
            yield from self._open()
        likely = self._likely(delta.logprobs)
        told = [] if likely is None else [one.model_dump(mode="json") for one in likely.content]
        (part,) = self._items[-1]["content"]
        part["text"] += text
        part["logprobs"] += told
        yield self._of_part("output_text.delta", delta=text, logprobs=told)

    def _close(self, answer: Answer | None = None) -> Iterator[dict[str, Any]]:
        if not self._is_open:
            return
        self._is_open = False
        item = self._items[-1]
        (part,) = item["content"]
        cited = (self._citations(answer) if answer is not None else None) or ()
        for number, one in enumerate(cited):
            place = {"type": one.type, **one.url_citation.model_dump(mode="json")}
            part["annotations"].append(place)
            told = {"annotation": place, "annotation_index": number}
            yield self._of_part("output_text.annotation.added", **told)
        done = {"text": part["text"], "logprobs": part["logprobs"]}
        yield self._of_part("output_text.done", **done)
        yield self._of_part("content_part.done", part=part)
        is_cut = answer is not None and finish_of(answer) != "stop"
        item["status"] = "incomplete" if is_cut else "completed"
        yield self._of_item("output_item.done", item=item)

    def _call(self, call_id: str, name: str, arguments: str) -> Iterator[dict[str, Any]]:
        item = {"id": _new_id("fc"), "type": "function_call", "call_id": call_id, "name": name}
        item |= {"arguments": "", "status": "in_progress"}
        self._items.append(item)
        yield self._of_item("output_item.added", item=item)
        place = {"item_id": item["id"]}
        yield self._of_item("function_call_arguments.delta", **place, delta=arguments)
        whole = {"name": name, "arguments": arguments}
        yield self._of_item("function_call_arguments.done", **place, **whole)
        item |= {"arguments": arguments, "status": "completed"}
        yield self._of_item("output_item.done", item=item)

    def _of_part(self, kind: str, **fields: Any) -> dict[str, Any]:
        return self._of_item(kind, item_id=self._items[-1]["id"], content_index=0, **fields)

    def _of_item(self, kind: str, **fields: Any) -> dict[str, Any]:
        return self._event_of(kind, output_index=len(self._items) - 1, **fields)

    def _event_of(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": f"response.{kind}", "sequence_number": next(self._sequence), **fields}

    def _response(self, answers: Sequence[Answer] = ()) -> dict[str, Any]:
        """Return the response as far as it is known: without answers, it has just begun."""
        given = self._given
        is_cut = any(finish_of(one) != "stop" for one in answers) and not self._num_calls[0]
        ended: Status = "incomplete" if is_cut else "completed"
        found = {
            "id": self._id,
            "object": "response",
            "created_at": self._head["created"],
            "status": ended if answers else "in_progress",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            **given.model_dump(include={"instructions", "max_output_tokens", "model", "user"}),
            "metadata": given.metadata or {},
            "output": self._items if answers else [],
            "parallel_tool_calls": given.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": given.temperature or 0.0,
            "text": _dumped(given.text) or {"format": {"type": "text"}},
            "tool_choice": _dumped(given.tool_choice) or "auto",
            "tools": [_dumped(one) for one in given.tools or ()],
            "top_p": 1.0 if given.top_p is None else given.top_p,
            "truncation": "disabled",
            "usage": _used(self._usage(answers)) if answers else None,
        }
        if answers and given.kvrag.report:
            found["kvrag"] = self._details(answers).model_dump(mode="json")
        return found


def _text(content: str | list[ItemPart]) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": one.text} for one in content]


def _used(usage: r.Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": usage.prompt_tokens_details.model_dump(),
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.total_tokens,
    }


def _dumped(value: Any) -> Any:
    if isinstance(value, q.Strict):
        return value.model_dump(mode="json", exclude_none=True, by_alias=True)
    return value


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"
