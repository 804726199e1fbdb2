"""How a model's chat template writes tools, calls of them, and their results."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvrag.errors import ParameterError
from kvrag.models import templates

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Turn = dict[str, Any]

CALL_MARKERS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>")
"""Strings that tell a call from other text; in some tokenizers they are special tokens."""

_PROBE = "kvrag_probe"
# Mistral's templates refuse ids of another length.
_ID_LENGTH = 9
_ID = re.compile(rf"[A-Za-z0-9]{{{_ID_LENGTH}}}")


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes a call.

    Attributes
    ----------
    begin, end
        The text around a call, or around a list of them.
    arguments
        The key of the arguments in a call's JSON object; "" for a name that `separator` and the
        arguments follow, outside JSON.
    separator
        See `arguments`.
    is_list
        Whether `begin` and `end` enclose a JSON list of calls.
    is_known
        Whether the chat template writes tools itself; otherwise `as_text` does.
    """

    begin: str
    end: str
    arguments: str = "arguments"
    separator: str = ""
    is_list: bool = False
    is_known: bool = True

    @property
    def marker(self) -> str:
        """The text that distinguishes a call from other text; "" if calls begin with their JSON."""
        return self.begin.strip().removesuffix("[") if self.is_list else self.begin.strip()


HERMES = ToolFormat("<tool_call>\n", "\n</tool_call>")
"""Hermes, Qwen and many others."""
LLAMA = ToolFormat("", "", "parameters")
"""Llama 3.1 and later: the answer is the JSON object of a call."""
MISTRAL = ToolFormat("[TOOL_CALLS] [", "]", is_list=True)
"""Mistral, up to the third version of its tokenizer."""
MISTRAL_NAMED = ToolFormat("[TOOL_CALLS]", "", "", separator="[ARGS]")
"""Mistral's later versions: the name, then the arguments."""


def tool_format(tokenizer: PreTrainedTokenizerBase) -> ToolFormat:
    """Return the format of a model's calls, as its chat template writes an earlier one.

    A template that does not know tools, or writes calls in a form that is none of these, gets
    `HERMES` with tools written by `as_text`.
    """
    call = {"name": _PROBE, "arguments": {"x": 1}}
    probe: list[Any] = [
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "0" * _ID_LENGTH, "type": "function", "function": call}],
        },
        {"role": "tool", "name": _PROBE, "tool_call_id": "0" * _ID_LENGTH, "content": "b"},
    ]
    tool = {
        "type": "function",
        "function": {
            "name": _PROBE,
            "description": "c",
            "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
        },
    }
    try:
        rendered = templates.render(tokenizer, probe, tools=[tool], add_generation_prompt=True)
        bare = templates.render(tokenizer, probe[:1], tools=[tool])
    except templates.TemplateRefusalError:
        return replace(HERMES, is_known=False)
    json_call = rf'\{{\s*"name":\s*"{_PROBE}",\s*"%s":\s*\{{'
    for found, pattern in (
        (HERMES, r"<tool_call>\s*" + json_call % "arguments"),
        (MISTRAL, r"\[TOOL_CALLS\]\s*\[\s*" + json_call % "arguments"),
        (MISTRAL_NAMED, rf"\[TOOL_CALLS\]\s*{_PROBE}\s*\[ARGS\]\s*\{{"),
        (LLAMA, json_call % "parameters"),
    ):
        if _PROBE in bare and re.search(pattern, rendered):
            return found
    return replace(HERMES, is_known=False)


def new_call_id(seed: str) -> str:
    """Return the id of a call, in a form that every template accepts.

    Equal seeds give equal ids, so that a repeated conversation has equal prompts.
    """
    return hashlib.blake2b(seed.encode("utf-8", "replace")).hexdigest()[:_ID_LENGTH]


def uses_tools(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether messages have calls or results."""
    return any(one.get("role") == "tool" or one.get("tool_calls") for one in messages)


def for_template(messages: Sequence[Mapping[str, Any]]) -> list[Turn]:
    """Return messages with calls as chat templates take them: arguments as mappings, short ids."""
    turns = []
    for message in messages:
        turn = dict(message)
        if turn.get("tool_calls"):
            turn["tool_calls"] = [_call_for_template(one) for one in turn["tool_calls"]]
            turn["content"] = turn.get("content") or ""
        if turn.get("tool_call_id"):
            turn["tool_call_id"] = _short_id(str(turn["tool_call_id"]))
        turns.append(turn)
    return turns


def as_text(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
) -> list[Turn]:
    """Return messages in which tools, calls and results are plain text, in the format `HERMES`.

    The tools come at the end of the system message. If the template refuses a system message, they
    come at the beginning of the user's first.
    """
    turns: list[Turn] = []
    for message in messages:
        role, text = str(message["role"]), message.get("content") or ""
        for call in message.get("tool_calls") or ():
            function = _call_for_template(call)["function"]
            written = json.dumps(
                {"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False
            )
            text += ("\n" if text else "") + f"{HERMES.begin}{written}{HERMES.end}"
        if role == "tool":
            role, text = "user", f"<tool_response>\n{text}\n</tool_response>"
        if turns and turns[-1]["role"] == role and isinstance(turns[-1]["content"], str):
            turns[-1]["content"] += f"\n{text}"
        else:
            turns.append({"role": role, "content": text})
    if not tools:
        return turns
    said = _instruction(tools)
    place = "system" if turns[0]["role"] == "system" or _has_system(tokenizer) else "user"
    if place == "system" and turns[0]["role"] != "system":
        return [{"role": "system", "content": said}, *turns]
    first = next((one for one in turns if one["role"] == place), None)
    if first is None:
        return [{"role": place, "content": said}, *turns]
    parts = [first["content"], said] if place == "system" else [said, first["content"]]
    first["content"] = "\n\n".join(parts)
    return turns


def _instruction(tools: Sequence[Mapping[str, Any]]) -> str:
    functions = "\n".join(json.dumps(one["function"], ensure_ascii=False) for one in tools)
    call = '{"name": "NAME", "arguments": {...}}'
    return (
        "You can call functions. Each line describes one:\n"
        f"<tools>\n{functions}\n</tools>\n"
        "To call a function, answer with its name and arguments and nothing else:\n"
        f"{HERMES.begin}{call}{HERMES.end}\n"
        "Its result comes back as <tool_response>."
    )


def _has_system(tokenizer: PreTrainedTokenizerBase) -> bool:
    messages = [{"role": role, "content": _PROBE + role} for role in ("system", "user")]
    try:
        rendered = templates.render(tokenizer, messages)
    except templates.TemplateRefusalError:
        return False
    return f"{_PROBE}system" in rendered


def _call_for_template(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not (isinstance(function, Mapping) and isinstance(function.get("name"), str)):
        raise ParameterError(
            "a tool call in a message: expected {'id': ..., 'type': 'function', 'function': "
            f"{{'name': ..., 'arguments': ...}}}}, found {call!r:.200}"
        )
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise ParameterError(
                f"the call of {function['name']!r} in a message has arguments that are no JSON: "
                f"{error}"
            ) from error
    return {
        "id": _short_id(str(call.get("id") or "")),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _short_id(given: str) -> str:
    return given if _ID.fullmatch(given) else new_call_id(given)
