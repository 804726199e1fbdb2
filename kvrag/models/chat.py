"""Messages rendered by a model's chat template, and which characters are the messages'."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvrag.errors import ParameterError
from kvrag.models.control import ControlTokens
from kvrag.models.hidden import HiddenStrings
from kvrag.models.tokens import Span
from kvrag.models.tools import as_text, for_template, tool_format, uses_tools

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
    """

    text: str
    add_special_tokens: bool
    data: tuple[Span, ...] | None = None


def render_messages(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    control: ControlTokens | None,
    tools: Sequence[Mapping[str, Any]] = (),
) -> PromptText:
    """Render messages by the chat template.

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
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ParameterError(
            "the model's tokenizer has no chat template: pass the prompt as one string, or "
            "set tokenizer.chat_template"
        )
    given = [dict(message) for message in messages]
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
    try:
        rendered = str(
            tokenizer.apply_chat_template(
                given, tools=offered or None, tokenize=False, add_generation_prompt=True
            )
        )
    except Exception as error:  # Jinja's own and whatever a template raises
        raise ParameterError(f"the chat template refuses these messages: {error}") from error
    if hidden is None:
        return PromptText(rendered, False)
    text, data = hidden.restore(rendered)
    return PromptText(text, False, data)


def hide_message(hidden: HiddenStrings, message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with control strings hidden everywhere except in its role."""
    is_answer = message.get("role") == "assistant"
    return {
        name: value if name == "role" else hidden.hide(value, is_answer=is_answer)
        for name, value in message.items()
    }
