"""The shape that tools give an answer, calls found in it, and what adapters report of it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from kvrag import arguments
from kvrag.engine.answer import Answer, AnswerDelta
from kvrag.engine.constraint import Constraint, TooComplexError, json_in_lark
from kvrag.engine.request import checked_tools
from kvrag.errors import ParameterError
from kvrag.fusion.report import FusionReport
from kvrag.models.tools import CALL_MARKERS, ToolFormat, new_call_id, tool_format

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_PYTHON_TAG = "<|python_tag|>"
# The name in Mistral's later formats, and where its arguments begin.
_NAMED = re.compile(r"\s*([\w.\-]+)\s*(?:\[ARGS\]\s*)?(?=\{)")
_JSON_MARK = re.compile(r"[\s;]*(?:<\|python_tag\|>)?\s*(?=\{)")
_decoder = json.JSONDecoder()


@dataclass(frozen=True)
class ToolCall:
    """A call.

    Attributes
    ----------
    id
        Names the call; its result refers to it.
    name
        The tool's name.
    arguments
        The arguments, a mapping.
    """

    id: str
    name: str
    arguments: dict[str, Any]

    @property
    def json(self) -> str:
        """The arguments as JSON."""
        return json.dumps(self.arguments, ensure_ascii=False)

    def to_dict(self) -> dict[str, Any]:
        """Return the call as in a message of OpenAI's API."""
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.json},
        }


@dataclass(frozen=True)
class Piece:
    """What a piece of an answer adds: text for the reader, and calls that are complete."""

    text: str = ""
    calls: tuple[ToolCall, ...] = ()

    def __add__(self, other: Piece) -> Piece:
        return Piece(self.text + other.text, self.calls + other.calls)


class ToolCallParser:
    """Tells an answer's calls from its text, piece by piece.

    A call is given out as soon as it is complete. What begins like a call but is none is text.

    Parameters
    ----------
    form
        How the model writes calls; None if there are no tools, and all is text.
    """

    def __init__(self, form: ToolFormat | None) -> None:
        self._form = form
        self._whole = self._rest = ""
        self._num_calls = 0
        self._has_said = False
        self._has_called = False  # just now

    def push(self, text: str) -> Piece:
        """Add a piece of the answer."""
        if self._form is None:
            return Piece(text)
        self._whole += text
        self._rest += text
        return self._take(self._form, is_last=False)

    def finish(self) -> Piece:
        """Return what was held back; call this after the last piece."""
        return Piece() if self._form is None else self._take(self._form, is_last=True)

    def read(self, delta: AnswerDelta) -> Piece:
        """Add a piece of an answer; with the last one comes what was held back."""
        said = self.push(delta.text)
        return said if delta.answer is None else said + self.finish()

    def whole(self, text: str) -> Piece:
        """Return a whole answer's text and calls."""
        return self.push(text) + self.finish()

    def _take(self, form: ToolFormat, *, is_last: bool) -> Piece:
        said, calls = "", []
        while mark := self._mark(form.marker):
            said += self._say(self._rest[: mark.start()])
            self._rest = self._rest[mark.start() :]
            found = self._read(form, mark.end() - mark.start(), is_last)
            if found is None:
                break
            calls += [self._numbered(*one) for one in found[0]]
            self._rest = self._rest[found[1] :]
            self._has_called = True
        if mark is None or is_last:
            settled = len(self._rest) if is_last else self._settled(form.marker)
            said += self._say(self._rest[:settled])
            self._rest = self._rest[settled:]
        return Piece(said, tuple(calls))

    def _say(self, text: str) -> str:
        """Return a piece of text; the white space after a call is the format's."""
        if self._has_called:
            text = text.lstrip()
        if text:
            self._has_called = False
        self._has_said = self._has_said or bool(text.strip("; \n"))
        return text

    def _mark(self, marker: str) -> re.Match[str] | None:
        """Return where the next call begins."""
        if marker:
            return re.search(rf"\s*{re.escape(marker)}\s*", self._rest)
        # The whole answer is a call, or several with semicolons between them.
        return None if self._has_said else _JSON_MARK.match(self._rest)

    def _settled(self, marker: str) -> int:
        """Return how many characters are certainly text, though no call has begun."""
        rest = self._rest
        if not marker:
            is_open = not self._has_said and _PYTHON_TAG.startswith(rest.strip("; \n"))
            return 0 if is_open else len(rest)
        most = min(len(marker) - 1, len(rest))
        held = next((n for n in range(most, 0, -1) if rest.endswith(marker[:n])), 0)
        return len(rest[: len(rest) - held].rstrip())

    def _read(
        self, form: ToolFormat, begin: int, is_last: bool
    ) -> tuple[list[tuple[str, Any]], int] | None:
        """Return the calls that begin there and where they end; None if they are not complete."""
        name = _NAMED.match(self._rest, begin) if form.separator else None
        try:
            found, end = _decoder.raw_decode(self._rest, name.end() if name else begin)
        except (ValueError, RecursionError):
            return None
        listed = found if isinstance(found, list) else [found]
        calls = [(name[1], found)] if name else [_named(one) for one in listed]
        if not calls or not all(isinstance(n, str) and isinstance(a, dict) for n, a in calls):
            return None
        close = "" if form.is_list else form.end.strip()
        tail = re.compile(rf"\s*{re.escape(close)}\s*").match(self._rest, end)
        if tail is None and not is_last:
            return None
        return calls, tail.end() if tail else end

    def _numbered(self, name: str, given: dict[str, Any]) -> ToolCall:
        self._num_calls += 1
        return ToolCall(new_call_id(f"{self._num_calls} {self._whole}"), name, given)


def _named(call: Any) -> tuple[Any, Any]:
    if not isinstance(call, dict):
        return None, None
    return call.get("name"), call.get("arguments", call.get("parameters"))


def token_usage(answer: Answer) -> dict[str, int]:
    """Return token counts; cached tokens are the prompt tokens whose KV was reused."""
    usage = answer.usage
    return {
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def short_name(model: str) -> str:
    """Return a model's name without the folder that it was loaded from; hub names stay whole."""
    return PurePath(model).name if PurePath(model).is_absolute() else model


def answer_details(answer: Answer, model_name: str) -> dict[str, Any]:
    """Return the answer's model, finish reason, times, savings, fusion report and sources.

    ``saved_tokens`` are prompt tokens whose KV was reused. ``saved_seconds_estimate`` is what
    computing them would have taken at the speed of the rows that were computed: too much where
    those were few. A source has ``chunk_id``, ``source``, ``ordinal``, ``text`` and ``metadata``.
    """
    return {
        "model_name": model_name,
        "finish_reason": answer.finish_reason,
        "ttft_seconds": answer.ttft_seconds,
        "total_seconds": answer.total_seconds,
        "saved_tokens": answer.usage.cached_tokens,
        "saved_seconds_estimate": _saved_seconds(answer.report),
        "report": answer.report.to_dict(),
        "sources": [{**vars(one), "metadata": dict(one.metadata)} for one in answer.sources],
    }


def _saved_seconds(report: FusionReport) -> float:
    """Return the estimated time of a full prefill beyond what fusing took; 0 if it is less."""
    share = report.work_share
    if not report.num_cached or not share:
        return 0.0
    return max(0.0, report.seconds.get("compute", 0.0) / share - sum(report.seconds.values()))


Tools = Sequence[Mapping[str, Any]]

_ANY_OBJECT = {"type": "object", "properties": {}}


@dataclass(frozen=True)
class Shape:
    """What a call of an adapter asks of the answer's form, as fields of a `Request`.

    Attributes
    ----------
    tools
        The tools that the answer may call.
    constraint
        The form that it must have.
    """

    tools: Tools = ()
    constraint: Constraint | None = None


def shape(
    tokenizer: PreTrainedTokenizerBase,
    tools: Tools | None = None,
    tool_choice: Any = None,
    response_format: Any = None,
) -> Shape:
    """Return the tools and the constraint that options in the form of OpenAI's API ask for.

    Parameters
    ----------
    tokenizer
        The model's tokenizer.
    tools
        The tools.
    tool_choice
        None and ``"auto"`` let the model decide; ``"none"`` hides the tools from it; ``"required"``
        and ``"any"`` force a call; a tool's name, or a mapping with it, forces a call of this tool.
        A forced answer is one call, and nothing else.
    response_format
        See `Constraint.of`. Together with tools, the answer is a call or has this form.

    Raises
    ------
    ParameterError
        If a value has another form, or the chosen tool is not among the tools.
    """
    constraint = Constraint.of(response_format)
    offered = checked_tools(tools or ())
    forced = _forced(offered, tool_choice)
    if not offered or tool_choice == "none":
        return Shape((), constraint)
    if forced:
        return Shape(offered, _constraint(_grammar(tokenizer, forced), forced))
    if constraint is not None:
        return Shape(offered, _call_or(tokenizer, offered, constraint))
    return Shape(offered)


def _forced(tools: Tools, choice: Any) -> Tools:
    """Return the tools of which one must be called; none if the model decides."""
    if choice in (None, False, "auto", "none"):
        return ()
    if not tools:
        raise ParameterError(f"tool_choice {arguments.shown(choice)} without tools: pass tools")
    if choice in (True, "required", "any"):
        return tools
    function = choice.get("function", choice) if isinstance(choice, Mapping) else {}
    name = choice if isinstance(choice, str) else function.get("name")
    chosen = [one for one in tools if one["function"]["name"] == name]
    if not chosen:
        names = ", ".join(one["function"]["name"] for one in tools)
        raise ParameterError(
            f"tool_choice {arguments.shown(choice)}: expected auto, none, required or one of the "
            f"tools {arguments.cut(names)}"
        )
    return chosen


def _call_or(tokenizer: PreTrainedTokenizerBase, tools: Tools, other: Constraint) -> Constraint:
    if other.kind != "json_schema":
        raise ParameterError(
            f"constraint of kind {other.kind}: with tools, only a JSON schema is possible; "
            "leave one out"
        )
    text = json_in_lark(json.loads(other.text))
    grammar = _grammar(tokenizer, tools).replace("start:", "start: other | ", 1)
    return _constraint(f"{grammar}other: {text}\n", tools)


def _constraint(grammar: str, tools: Tools) -> Constraint:
    """Return a grammar of calls as a constraint; if it is wrong, name the tool, not the grammar."""
    try:
        return Constraint.lark(grammar)
    except TooComplexError:
        raise  # that of all tools together
    except ParameterError:
        for one in tools:
            function = one["function"]
            try:
                Constraint.json_schema(function.get("parameters") or _ANY_OBJECT)
            except ParameterError as error:
                name = arguments.shown(function["name"])
                raise ParameterError(f"the parameters of the tool {name}: {error}") from error
        raise


def _grammar(tokenizer: PreTrainedTokenizerBase, tools: Tools) -> str:
    """Return the grammar of one call of one of the tools."""
    form = tool_format(tokenizer)
    calls = " | ".join(f"call_{number}" for number in range(len(tools)))
    begin, end = (_literal(tokenizer, one) for one in (form.begin, form.end))
    lines = [f"start: {begin} ({calls}) {end}"]
    for number, one in enumerate(tools):
        function = one["function"]
        if form.separator:
            head, tail = function["name"] + form.separator, ""
        else:
            head = f'{{"name": {json.dumps(function["name"])}, "{form.arguments}": '
            tail = "}"
        parts = f"{_literal(tokenizer, head)} args_{number} {_literal(tokenizer, tail)}"
        lines += [
            f"call_{number}: {parts}",
            f"args_{number}: {json_in_lark(function.get('parameters') or _ANY_OBJECT)}",
        ]
    return "\n".join([*lines, ""])


def _literal(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """Return a text as part of a grammar; special tokens in it by their numbers."""
    special = {
        str(one): number for number, one in tokenizer.added_tokens_decoder.items() if one.special
    }
    marks = [mark for mark in CALL_MARKERS if mark in special]
    pieces = re.split("(" + "|".join(map(re.escape, marks)) + ")", text) if marks else [text]
    return " ".join(
        f"<[{special[one]}]>" if one in marks else json.dumps(one) for one in pieces if one
    )
