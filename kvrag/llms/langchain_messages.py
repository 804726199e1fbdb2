"""Convert LangChain messages to the turns that a chat template renders."""

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
from kvrag.llms.turns import merge_turns


def to_turns(messages: Sequence[BaseMessage]) -> list[dict[str, str]]:
    """Return the role and content of each turn; neighbours of one role become one turn.

    Raises
    ------
    ParameterError
        When a message holds something other than text, or a tool call or its result.
    """
    if not messages:
        raise ParameterError("a conversation needs at least one message, found none")
    return merge_turns((_role(message), _text(message)) for message in messages)


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
                "Pass the tool's result as text, for instance in a HumanMessage"
            )
        return "assistant"
    raise ParameterError(
        f"a {type(message).__name__} cannot be rendered: this model does not call tools. Pass "
        "its content as text, for instance in a HumanMessage"
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
