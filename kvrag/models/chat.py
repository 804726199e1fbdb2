"""Messages rendered by a model's chat template, and which characters are the messages'.

`HiddenStrings` keeps their control strings from the template.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvrag.errors import ParameterError
from kvrag.models import templates
from kvrag.models.control import ControlTokens
from kvrag.models.messages import arrangements, normalised
from kvrag.models.tokens import Span
from kvrag.models.tools import as_text, for_template, tool_format, uses_tools

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
    or the beginning of the user's first one (`kvrag.models.messages.arrangements`).

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
