"""Messages rendered by a model's chat template, and which characters are the messages'.

`HiddenStrings` keeps their control strings from the template.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvrag import arguments
from kvrag.errors import ParameterError
from kvrag.models import templates
from kvrag.models.control import ControlTokens
from kvrag.models.tokens import Span
from kvrag.models.tools import as_text, for_template, tool_format, uses_tools

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# -- messages ------------------------------------------------------------------------------------

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


# -- chat templates ------------------------------------------------------------------------------

# A hidden string's mark, with its number.
_MARK = re.compile("\ue010([0-9]+)\ue011")
_MARK_EDGE = re.compile("[\ue010\ue011]")


class HiddenStrings:
    """Control strings of messages while a chat template renders them.

    Marks that no template looks for replace them, so that a message's text neither steers the
    template nor is mistaken for the template's own text.
    """

    def __init__(self, control: ControlTokens) -> None:
        self._control = control
        self._strings: list[str] = []

    def hide(self, value: Any, *, is_answer: bool = False) -> Any:
        """Return a content with marks in place of control strings, also in lists and mappings.

        Parameters
        ----------
        value
            A message's content.
        is_answer
            Whether the content is an answer of the model.
        """
        if isinstance(value, str):
            pieces, end = [], 0
            spans = self._control.hidden_spans(value, is_answer=is_answer)
            # Text that looks like a mark is hidden too: any other mark left over is a damaged one.
            spans += [match.span() for match in _MARK_EDGE.finditer(value)]
            for start, stop in sorted(spans):
                pieces += [value[end:start], f"\ue010{len(self._strings)}\ue011"]
                self._strings.append(value[start:stop])
                end = stop
            return "".join([*pieces, value[end:]])
        if isinstance(value, dict):
            return {
                self._hide_key(key): self.hide(one, is_answer=is_answer)
                for key, one in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.hide(one, is_answer=is_answer) for one in value]
        return value

    def _hide_key(self, key: Any) -> Any:
        # A template looks keys up by name, so only one that no template looks for may change: the
        # name of an argument, which a model chose.
        return self.hide(key) if isinstance(key, str) and self._control.find(key) else key

    def restore(self, rendered: str) -> tuple[str, tuple[Span, ...]]:
        """Return the rendered text with the strings restored, and their spans.

        Raises
        ------
        ParameterError
            When the template split a mark.
        """
        pieces: list[str] = []
        spans: list[Span] = []
        end = length = 0
        for match in _MARK.finditer(rendered):
            string = self._strings[int(match[1])]
            pieces += [rendered[end : match.start()], string]
            length += match.start() - end
            spans.append((length, length + len(string)))
            length += len(string)
            end = match.end()
        pieces.append(rendered[end:])
        if any(_MARK_EDGE.search(piece) for piece in pieces[::2]):
            raise ParameterError(
                "the chat template takes messages apart in the middle of a control string: remove "
                "such strings from the messages, or use another template"
            )
        return "".join(pieces), tuple(spans)


_PROBE = "kvrag probe"


@dataclass(frozen=True)
class PromptText:
    """A prompt as one string.

    Attributes
    ----------
    text
        The whole prompt.
    add_special_tokens
        Whether the tokenizer adds its special tokens; a rendered chat template has them already.
    data
        Where messages hold control strings, in order; None for a prompt that the caller wrote as
        one string, whose control strings may be either.
    num_folded
        How many messages were moved or joined with others, because the template refuses or leaves
        out messages where they stood.
    """

    text: str
    add_special_tokens: bool
    data: tuple[Span, ...] | None = None
    num_folded: int = 0


def render_messages(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    control: ControlTokens | None,
    tools: Sequence[Mapping[str, Any]] = (),
) -> PromptText:
    """Render messages by the chat template.

    If the template refuses them or leaves out a text, all system messages become the first message,
    or the beginning of the user's first one (`kvrag.models.chat.arrangements`).

    Parameters
    ----------
    tokenizer
        The model's tokenizer.
    messages
        Mappings with ``role`` and ``content``, perhaps with calls of tools and their results.
    control
        Hides control strings in contents from the template and notes their places; None passes
        contents on unchanged.
    tools
        Functions that the model may call. If the template does not know tools, they are written as
        text (`kvrag.models.tools.as_text`).

    Raises
    ------
    ParameterError
        When the tokenizer has no chat template, or the template refuses the messages.
    UnsupportedModelError
        When rendering takes too long.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ParameterError(
            "the model's tokenizer has no chat template: pass the prompt as one string, or "
            "set tokenizer.chat_template"
        )
    given = normalised(messages)
    lost: PromptText | None = None
    refused: ParameterError | None = None
    for as_parts in (False, True):
        if as_parts and not _wants_parts(tokenizer):
            break
        for turns, num_folded in arrangements(given):
            try:
                written, is_whole = _render(tokenizer, turns, control, tools, as_parts=as_parts)
            except ParameterError as error:
                refused = refused or error
                continue
            written = replace(written, num_folded=num_folded)
            if is_whole:
                return written
            lost = lost or written
    if lost is None:
        assert refused is not None
        raise refused
    return lost


def _render(
    tokenizer: PreTrainedTokenizerBase,
    given: list[dict[str, Any]],
    control: ControlTokens | None,
    tools: Sequence[Mapping[str, Any]],
    *,
    as_parts: bool,
) -> tuple[PromptText, bool]:
    """Return rendered messages, and whether all that system and user say is in them."""
    offered: list[Any] = [dict(tool) for tool in tools]
    if offered or uses_tools(given):
        if tool_format(tokenizer).is_known:
            given = for_template(given)
        else:
            given, offered = as_text(tokenizer, given, offered), []
    hidden = None if control is None else HiddenStrings(control)
    if hidden is not None:
        given = [hide_message(hidden, message) for message in given]
        offered = hidden.hide(offered)
    turns = [_in_parts(message) for message in given] if as_parts else given
    try:
        rendered = templates.render(tokenizer, turns, tools=offered, add_generation_prompt=True)
    except templates.TemplateRefusalError as error:
        raise ParameterError(f"the chat template refuses these messages: {error}") from error
    said = (str(one["content"]).strip() for one in given if one["role"] in ("system", "user"))
    is_whole = all(one in rendered for one in said)
    if hidden is None:
        return PromptText(rendered, False), is_whole
    text, data = hidden.restore(rendered)
    return PromptText(text, False, data), is_whole


def _in_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with its content as a list of parts."""
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def _wants_parts(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the template reads lists of parts alone, as some that know pictures do."""
    probe = {"role": "user", "content": _PROBE}
    if _PROBE in _attempt(tokenizer, probe):
        return False
    said = _attempt(tokenizer, _in_parts(probe))
    return _PROBE in said and f"'{_PROBE}'" not in said  # the list as Python writes it


def _attempt(tokenizer: PreTrainedTokenizerBase, message: dict[str, Any]) -> str:
    try:
        return templates.render(tokenizer, [message])
    except templates.TemplateRefusalError:
        return ""


def hide_message(hidden: HiddenStrings, message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with control strings hidden everywhere except in its role."""
    is_answer = message.get("role") == "assistant"
    return {
        name: value if name == "role" else hidden.hide(value, is_answer=is_answer)
        for name, value in message.items()
    }
