"""Forcing the form of an answer: calls of tools, and response formats."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvrag import arguments
from kvrag.engine.constraint import Constraint, TooComplexError, json_in_lark
from kvrag.engine.request import checked_tools
from kvrag.errors import ParameterError
from kvrag.models.tools import CALL_MARKERS, tool_format

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
