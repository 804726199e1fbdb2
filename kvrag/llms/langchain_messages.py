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
from kvrag.models.messages import merged


def to_turns(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """Return messages in the form of OpenAI's API; neighbours of one role become one turn.

    Raises
    ------
    ParameterError
        When a message holds something other than text and calls of tools.
    """
    if not messages:
        raise ParameterError("a conversation needs at least one message, found none")
    return merged(map(_turn, messages))


def _turn(message: BaseMessage) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": _role(message), "content": message.content}
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
