"""From LangChain messages to the turns a chat template renders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    HumanMessage,
    SystemMessage,
)

from kvrag.errors import ParameterError

TURN_SEPARATOR = "\n\n"
"""What stands between merged turns of one role."""


def to_turns(messages: Sequence[BaseMessage]) -> list[dict[str, str]]:
    """Return role and content of each turn; neighbours of one role become one turn.

    Most chat templates refuse two turns of one role in a row, while chains produce them.

    Raises
    ------
    ParameterError
        When a message holds something other than text, or a tool call or its result.
    """
    if not messages:
        raise ParameterError("a conversation needs at least one message, found none")
    turns: list[dict[str, str]] = []
    for message in messages:
        role, text = _role(message), _text(message)
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] += TURN_SEPARATOR + text
        else:
            turns.append({"role": role, "content": text})
    return turns


def _role(message: BaseMessage) -> str:
    if isinstance(message, SystemMessage):
        return "system"
    if isinstance(message, HumanMessage):
        return "user"
    if isinstance(message, ChatMessage):
        return message.role
    if isinstance(message, AIMessage):
        if message.tool_calls or message.invalid_tool_calls:
            raise ParameterError(
                "an AIMessage with tool calls cannot be rendered: this model does not call tools. "
                "Hand the tool's result on as text, for instance in a HumanMessage"
            )
        return "assistant"
    raise ParameterError(
        f"a {type(message).__name__} cannot be rendered: this model does not call tools. Hand "
        "its content on as text, for instance in a HumanMessage"
    )


def _text(message: BaseMessage) -> str:
    if isinstance(message.content, str):
        return message.content
    return "".join(_block_text(block) for block in message.content)


def _block_text(block: str | dict[str, Any]) -> str:
    if isinstance(block, str):
        return block
    if block.get("type") == "text":
        return str(block["text"])
    raise ParameterError(
        f"a content block of type {block.get('type')!r} cannot be rendered: this model reads "
        "text only"
    )
