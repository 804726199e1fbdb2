"""Chat templates, rendered in a separate process within limits.

A template is a program that came with a model. Transformers renders it in a sandbox, which keeps it
from the interpreter but not from running for ever. The variables here are those that Transformers
gives a template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvrag.errors import UnsupportedModelError
from kvrag.process import Child, ChildError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SECONDS = 1.0
"""CPU time that rendering may take; real templates take a thousandth of it."""
# What models call an answer's reasoning, the standard name first.
_REASONING = ("reasoning_content", "thinking", "reasoning")

_process = Child("kvrag.models.template_process", SECONDS)


class TemplateRefusalError(Exception):
    """The template refuses the messages, or is wrong; the message is its own."""


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = False,
) -> str:
    """Return messages as the tokenizer's chat template writes them.

    Raises
    ------
    TemplateRefusalError
        When it refuses them.
    UnsupportedModelError
        When it takes more than `SECONDS`, or ends its process.
    """
    try:
        offered = [dict(tool) for tool in tools or ()] or None
        template = tokenizer.get_chat_template(None, offered)
        variables = {
            **tokenizer.special_tokens_map,
            "messages": [_plain(message) for message in messages],
            "tools": offered,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        answer = _process.ask({"template": template, "variables": variables})
    except ChildError as error:
        raise UnsupportedModelError(
            f"the model's chat template cannot be rendered: {error}. Set tokenizer.chat_template "
            "to a template that ends, or pass prompts as one string (--no-chat)"
        ) from error
    except (TypeError, ValueError) as error:  # messages that are no JSON, no default template
        raise TemplateRefusalError(str(error)) from error
    if "refused" in answer:
        raise TemplateRefusalError(answer["refused"])
    return str(answer["text"])


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without values of None, which templates would write as text."""
    made = {name: value for name, value in message.items() if value is not None}
    reasoning = next((made[name] for name in _REASONING if name in made), None)
    if reasoning is None:
        return made
    return {"thinking": reasoning, **made, "reasoning_content": reasoning}
