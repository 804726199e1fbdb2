"""Messages of conversations: one form for all callers, and forms for templates that refuse it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from kvrag import arguments
from kvrag.errors import ParameterError

TURN_SEPARATOR = "\n\n"
"""Separator between messages that become one."""

_ROLES = {
    "developer": "system",
    **dict.fromkeys(("ai", "chatbot", "model"), "assistant"),
    "human": "user",
    "function": "tool",
}
_TEXT_PARTS = ("text", "input_text", "output_text")
# Thoughts of other models are not rendered again.
_THOUGHTS = ("thinking", "redacted_thinking", "reasoning")
# Calls that other providers repeat in the content; `tool_calls` has them.
_CALLS = ("tool_use", "tool_call")

Turn = dict[str, Any]


def role_of(name: str) -> str:
    """Return the role that chat templates know for a role's name; unknown names stay."""
    return _ROLES.get(name, name)


def text_of(content: Any, *, has_calls: bool = False) -> str:
    """Return a message's content as one text: parts are joined without a separator.

    Parameters
    ----------
    content
        A text, a list of texts and of mappings such as ``{"type": "text", "text": ...}``, or None.
    has_calls
        Whether the message has its calls of tools elsewhere, so that those in its content are left
        out.

    Raises
    ------
    ParameterError
        If there is something other than text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise ParameterError(
            f"a message's content is {arguments.shown(content)}: expected text, or parts such as "
            "{'type': 'text', 'text': '...'}"
        )
    return "".join(_part(one, has_calls) for one in content)


def _part(part: Any, has_calls: bool) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind in _THOUGHTS or (has_calls and kind in _CALLS):
        return ""
    text = part.get("text") if kind in _TEXT_PARTS else None
    if not isinstance(text, str):
        raise ParameterError(
            f"a part of type {arguments.shown(kind)} in a message cannot be rendered: this model "
            "reads text only"
        )
    return text


def normalised(messages: Iterable[Mapping[str, Any]]) -> list[Turn]:
    """Return messages with roles that templates know, and each content as one text.

    Raises
    ------
    ParameterError
        If a message has no role or no content, or holds something other than text.
    """
    return [_turn(number, one) for number, one in enumerate(messages, start=1)]


def _turn(number: int, message: Mapping[str, Any]) -> Turn:
    role, calls = message.get("role"), message.get("tool_calls")
    if not isinstance(role, str) or not role:
        raise ParameterError(
            f"message {number} in the prompt: expected a role such as 'user', found "
            f"{arguments.shown(message)}; add 'role': 'user'"
        )
    content = message.get("content")
    if content is None and not calls:
        raise ParameterError(
            f"message {number} in the prompt has no content; add 'content', or leave the message "
            "out"
        )
    return {**message, "role": role_of(role), "content": text_of(content, has_calls=bool(calls))}


def merged(messages: Iterable[Mapping[str, Any]]) -> list[Turn]:
    """Return messages in the form of `normalised`, in which neighbours of one role are one.

    Most chat templates reject two messages of one role in a row, but chains and query engines
    produce them. Messages with calls of tools and their results stay as they are.
    """
    turns: list[Turn] = []
    for turn in normalised(messages):
        before = turns[-1] if turns else {}
        if before.keys() == turn.keys() == {"role", "content"} and before["role"] == turn["role"]:
            before["content"] += TURN_SEPARATOR + turn["content"]
        else:
            turns.append(turn)
    return turns


def arrangements(turns: Sequence[Turn]) -> Iterator[tuple[list[Turn], int]]:
    """Yield messages as they are, and then as stricter templates take them.

    Second, all system messages are one, the first message, and neighbours of one role are one.
    Third, that one begins the user's first message. With each comes how many messages were moved
    or joined.
    """
    yield list(turns), 0
    said = [one["content"] for one in turns if one["role"] == "system"]
    others = merged(one for one in turns if one["role"] != "system")
    system = TURN_SEPARATOR.join(said)
    whole = [{"role": "system", "content": system}, *others] if said else others
    num_joined = len(turns) - len(others)
    if whole != turns:
        yield whole, num_joined - (turns[0]["role"] == "system")
    first = next((number for number, one in enumerate(others) if one["role"] == "user"), None)
    if said and first is not None:
        turn = others[first]
        content = TURN_SEPARATOR.join([system, turn["content"]])
        yield [*others[:first], {**turn, "content": content}, *others[first + 1 :]], num_joined
