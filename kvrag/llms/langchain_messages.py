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
    ToolMessage,
)

from kvrag.errors import ParameterError
from kvrag.llms.tool_calls import ToolCall
from kvrag.llms.turns import merge_turns

# Blocks of other providers: `tool_calls` says what is called, and thoughts are not rendered again.
_NOT_SAID = ("tool_use", "tool_call", "thinking", "reasoning")


def to_turns(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """Return messages in the form of OpenAI's API; neighbours of one role become one turn.

    Raises
    ------
    ParameterError
        When a message holds something other than text and calls of tools.
    """
    if not messages:
        raise ParameterError("a conversation needs at least one message, found none")
    return merge_turns(map(_turn, messages))


def _turn(message: BaseMessage) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": _role(message), "content": _text(message)}
    if isinstance(message, AIMessage) and message.tool_calls:
        calls = [ToolCall(one["id"] or "", one["name"], one["args"]) for one in message.tool_calls]
        turn["tool_calls"] = [call.to_dict() for call in calls]
    if isinstance(message, ToolMessage):
        turn["tool_call_id"] = message.tool_call_id
        if message.name:
            turn["name"] = message.name
    return turn


def _role(message: BaseMessage) -> str:
    if isinstance(message, SystemMessage):
        return "system"
    if isinstance(message, HumanMessage):
        return "user"
    if isinstance(message, ChatMessage):
        return message.role
    if isinstance(message, AIMessage):
        return "assistant"
    if isinstance(message, ToolMessage):
        return "tool"
    raise ParameterError(
        f"a {type(message).__name__} cannot be rendered: pass its content as text, for instance in "
        "a HumanMessage"
    )


def _text(message: BaseMessage) -> str:
    if isinstance(message.content, str):
        return message.content
    return "".join(_block_text(block) for block in message.content)


def _block_text(block: str | dict[str, Any]) -> str:
    if isinstance(block, str):
        return block
    if block.get("type") in _NOT_SAID:
        return ""
    if block.get("type") == "text":
        return str(block["text"])
    raise ParameterError(
        f"a content block of type {block.get('type')!r} cannot be rendered: this model reads "
        "text only"
    )
