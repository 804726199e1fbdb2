"""Answers in the shapes of OpenAI's API: whole ones, and events of streams."""

from __future__ import annotations

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvrag.chunk import Chunk
from kvrag.engine.answer import Answer, AnswerDelta, TokenLogprob
from kvrag.llms.tool_calls import Piece, ToolCall, ToolCallParser, answer_details
from kvrag.models.tokens import token_bytes
from kvrag.models.tools import ToolFormat
from kvrag.server import responses as r
from kvrag.server.citing import citations, cited
from kvrag.server.problems import RequestError
from kvrag.server.requests import ChatRequest, Generating

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Shape(ABC):
    """How the answers to one request are written.

    Parameters
    ----------
    asked
        The request.
    tokenizer
        The model's.
    fingerprint
        Names the model's weights; equal seeds give equal answers only with equal fingerprints.

    Attributes
    ----------
    search_seconds
        The time in which the server found the chunks; None if it did not search.
    found
        Those chunks, if the stream begins with them.
    whole, piece
        The bodies of a response and of a stream's event.
    media_type, ping, ending
        Of streams: their type, what keeps a connection open, and what follows the last event.
    """

    prefix: str
    whole: Any
    piece: Any
    media_type = "text/event-stream"
    ping = ": waiting\n\n"
    ending = "data: [DONE]\n\n"

    def __init__(
        self, asked: Generating, tokenizer: PreTrainedTokenizerBase, fingerprint: str
    ) -> None:
        self._asked = asked
        self._tokenizer = tokenizer
        self._head: dict[str, Any] = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": asked.model,
            "system_fingerprint": fingerprint,
        }
        self._begun: set[int] = set()
        self.search_seconds: float | None = None
        self.found: Sequence[Chunk] = ()

    def body(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """Return the response with all answers as JSON values."""
        choices = [self._choice(number, answer) for number, answer in enumerate(answers)]
        details = self._details(answers) if self._asked.kvrag.report else None
        told = {"usage": self._usage(answers), "kvrag": details}
        return to_json(self.whole(choices=choices, **self._head, **told))

    def written(self, body: dict[str, Any]) -> str:
        """Return an event as a stream has it."""
        data = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
        # Those of the Responses API are named.
        return f"event: {body['type']}\ndata: {data}\n\n" if "type" in body else f"data: {data}\n\n"

    def opening(self) -> Iterator[dict[str, Any]]:
        """Yield the events before the first piece."""
        yield from ()

    @abstractmethod
    def events(self, number: int, delta: AnswerDelta) -> Iterator[dict[str, Any]]:
        """Yield the events for a piece of a choice as JSON values."""

    def closing(self, answers: Sequence[Answer]) -> Iterator[dict[str, Any]]:
        """Yield a stream's last event, which has no choices, if anything is left to say."""
        fields: dict[str, Any] = {}
        if self._asked.includes_usage:
            fields["usage"] = self._usage(answers)
        if self._asked.kvrag.report:
            fields["kvrag"] = self._details(answers)
        if fields:
            yield self._event([], **fields)

    def failure(self, problem: RequestError) -> Iterator[dict[str, Any]]:
        """Yield the events of a stream that fails."""
        yield problem.to_dict()

    @abstractmethod
    def _choice(self, number: int, answer: Answer) -> Any: ...

    def _event(self, choices: list[Any], **fields: Any) -> dict[str, Any]:
        return to_json(self.piece(choices=choices, **self._head, **fields))

    def _usage(self, answers: Sequence[Answer]) -> r.Usage:
        # Choices of one prompt count its tokens once, as in OpenAI's API.
        firsts = answers[:: self._asked.n or 1]
        prompt = sum(one.usage.prompt_tokens for one in firsts)
        completion = sum(one.usage.completion_tokens for one in answers)
        return r.Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=r.PromptDetails(
                cached_tokens=sum(one.usage.cached_tokens for one in firsts)
            ),
        )

    def _details(self, answers: Sequence[Answer]) -> r.KVRagDetails:
        told = [answer_details(one, self._asked.model) for one in answers]
        return r.KVRagDetails(
            reports=[one["report"] for one in told],
            sources=[one["sources"] for one in told],
            ttft_seconds=[one.ttft_seconds for one in answers],
            search_seconds=self.search_seconds,
            parts=[[asdict(part) for part in one.parts] for one in answers]
            if self._asked.kvrag.explain
            else None,
        )


class ChatShape(Shape):
    """Chat completions; with citations if the server has retrieved.

    Parameters
    ----------
    asked, tokenizer, fingerprint
        See `Shape`.
    cites
        Whether answers have citations.
    calls
        How the model writes calls of tools; None if answers have none.
    """

    prefix, whole, piece = "chatcmpl", r.ChatCompletion, r.ChatChunk

    def __init__(
        self,
        asked: ChatRequest,
        tokenizer: PreTrainedTokenizerBase,
        fingerprint: str,
        *,
        cites: bool,
        calls: ToolFormat | None = None,
    ) -> None:
        super().__init__(asked, tokenizer, fingerprint)
        self._question = asked.question
        self._cites = cites
        self._calls = calls
        self._most_calls = 1 if asked.parallel_tool_calls is False else None
        self._parsers: dict[int, ToolCallParser] = {}
        self._num_calls: Counter[int] = Counter()

    def opening(self) -> Iterator[dict[str, Any]]:
        """Yield what was found, if the request asks for it."""
        if self.found:
            found = [cited(one).model_dump(mode="json") for one in self.found]
            yield self._event([]) | {"kvrag": {"found": found}}

    def _choice(self, number: int, answer: Answer) -> r.ChatChoice:
        said = ToolCallParser(self._calls).whole(answer.text)
        message = r.ChatMessage(
            role="assistant",
            content=said.text if said.text or not said.calls else None,
            tool_calls=[_call(one) for one in said.calls[: self._most_calls]] or None,
            annotations=self._citations(answer),
        )
        finish: r.FinishReason = "tool_calls" if said.calls else finish_of(answer)
        return r.ChatChoice(
            index=number,
            message=message,
            logprobs=self._likely(answer.logprobs),
            finish_reason=finish,
        )

    def events(self, number: int, delta: AnswerDelta) -> Iterator[dict[str, Any]]:
        """Yield the role once, then text and calls, then the reason for the end."""
        if number not in self._begun:
            self._begun.add(number)
            yield self._piece(number, r.ChatMessage(role="assistant", content=""))
        said = self._parsed(number, delta)
        if said.text or delta.logprobs:
            message = r.ChatMessage(content=said.text)
            yield self._piece(number, message, likely=self._likely(delta.logprobs))
        for one in said.calls:
            if self._num_calls[number] == self._most_calls:
                break
            call = _call(one, self._num_calls[number])
            self._num_calls[number] += 1
            yield self._piece(number, r.ChatMessage(tool_calls=[call]))
        if delta.answer is not None:
            cited = r.ChatMessage(annotations=self._citations(delta.answer))
            has_called = self._num_calls[number] > 0
            yield self._piece(
                number, cited, "tool_calls" if has_called else finish_of(delta.answer)
            )

    def _parsed(self, number: int, delta: AnswerDelta) -> Piece:
        return self._parsers.setdefault(number, ToolCallParser(self._calls)).read(delta)

    def _piece(
        self,
        number: int,
        delta: r.ChatMessage,
        finish: r.FinishReason | None = None,
        likely: r.ChatLogprobs | None = None,
    ) -> dict[str, Any]:
        choice = r.ChatDelta(index=number, delta=delta, logprobs=likely, finish_reason=finish)
        return self._event([choice])

    def _likely(self, tokens: Sequence[TokenLogprob]) -> r.ChatLogprobs | None:
        is_asked = self._asked.num_logprobs is not None
        return chat_logprobs(self._tokenizer, tokens) if is_asked else None

    def _citations(self, answer: Answer) -> list[r.Annotation] | None:
        return citations(answer, self._question) if self._cites else None


class TextShape(Shape):
    """Completions."""

    prefix, whole, piece = "cmpl", r.Completion, r.Completion

    def events(self, number: int, delta: AnswerDelta) -> Iterator[dict[str, Any]]:
        """Yield the text, the last time with the reason for the end."""
        finish = None if delta.answer is None else finish_of(delta.answer)
        yield self._event([self._choice(number, delta, finish)])

    def _choice(
        self, number: int, said: Answer | AnswerDelta, finish: r.FinishReason | None = None
    ) -> r.TextChoice:
        is_asked = self._asked.num_logprobs is not None
        likely = text_logprobs(self._tokenizer, said.logprobs) if is_asked else None
        finish = finish_of(said) if isinstance(said, Answer) else finish
        return r.TextChoice(index=number, text=said.text, logprobs=likely, finish_reason=finish)


def to_json(body: r.Head) -> dict[str, Any]:
    """Return a body as JSON values, without the optional fields that it does not use."""
    found = body.model_dump(mode="json")
    for name in ("usage", "kvrag"):
        if found[name] is None:
            del found[name]
    for choice in found["choices"]:
        for name in choice.keys() & {"message", "delta"}:
            said = {key: one for key, one in choice[name].items() if one is not None}
            for call in said.get("tool_calls", ()):
                if call["index"] is None:
                    del call["index"]
            if name == "message":
                said.setdefault("content", None)
            choice[name] = said
    return found


def _call(call: ToolCall, number: int | None = None) -> r.ToolCall:
    function = r.CalledFunction(name=call.name, arguments=call.json)
    return r.ToolCall(index=number, id=call.id, function=function)


def finish_of(answer: Answer) -> r.FinishReason:
    """Return why an answer ended, in OpenAI's words: a loop has no other end."""
    return "stop" if answer.finish_reason in ("stop", "loop") else "length"


# OpenAI's, for what JSON has no number for.
_LEAST = -9999.0


def chat_logprobs(
    tokenizer: PreTrainedTokenizerBase, tokens: Sequence[TokenLogprob]
) -> r.ChatLogprobs:
    """Return the field ``logprobs`` of a chat choice."""

    def one(token_id: int, logprob: float) -> r.LikelyToken:
        data = token_bytes(tokenizer, token_id)
        return r.LikelyToken(token=_text(data), logprob=max(logprob, _LEAST), bytes=list(data))

    content = [
        r.ChosenToken(
            **one(token.token_id, token.logprob).model_dump(),
            top_logprobs=[one(*likely) for likely in token.top],
        )
        for token in tokens
    ]
    return r.ChatLogprobs(content=content)


def text_logprobs(
    tokenizer: PreTrainedTokenizerBase, tokens: Sequence[TokenLogprob]
) -> r.TextLogprobs:
    """Return the field ``logprobs`` of a completion."""

    def text(token_id: int) -> str:
        return _text(token_bytes(tokenizer, token_id))

    found = r.TextLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    for token in tokens:
        found.tokens.append(text(token.token_id))
        found.token_logprobs.append(max(token.logprob, _LEAST))
        # The chosen token, too, as in OpenAI's API; two tokens of one text count as the likelier.
        both = sorted([*token.top, (token.token_id, token.logprob)], key=lambda one: one[1])
        likely = {text(token_id): max(logprob, _LEAST) for token_id, logprob in both}
        found.top_logprobs.append(dict(reversed(likely.items())) if token.top else {})
        found.text_offset.append(token.start)
    return found


def _text(data: bytes) -> str:
    r"""Return a token as text; a part of a character as ``bytes:\xe2\x80``."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{one:02x}" for one in data)
