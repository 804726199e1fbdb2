"""Convert LlamaIndex messages to the turns that a chat template renders, and answers back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, MessageRole, TextBlock, ToolCallBlock

from kvrag.llms.tool_calls import Piece, ToolCall
from kvrag.models.messages import merged


def to_turns(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Return messages in the form of OpenAI's API; neighbours of one role become one turn.

    Raises
    ------
    ParameterError
        When a message holds something other than text and calls of tools.
    """
    return merged(map(_turn, messages))


def to_message(piece: Piece) -> ChatMessage:
    """Return what a model has said and called as one message."""
    blocks: list[Any] = [TextBlock(text=piece.text)] if piece.text or not piece.calls else []
    blocks += [
        ToolCallBlock(tool_call_id=one.id, tool_name=one.name, tool_kwargs=one.arguments)
        for one in piece.calls
    ]
    return ChatMessage(role=MessageRole.ASSISTANT, blocks=blocks)


def _turn(message: ChatMessage) -> dict[str, Any]:
    calls = [_call(block) for block in message.blocks if isinstance(block, ToolCallBlock)]
    said = [block for block in message.blocks if not isinstance(block, ToolCallBlock)]
    given = message.additional_kwargs
    turn: dict[str, Any] = {
        "role": message.role.value,
        "content": [
            block.text if isinstance(block, TextBlock) else {"type": block.block_type}
            for block in said
        ],
    }
    # Models that know no blocks of calls put them into the other arguments.
    calls = calls or [dict(one) for one in given.get("tool_calls") or () if isinstance(one, dict)]
    if calls:
        turn["tool_calls"] = calls
    return turn | {
        name: str(given[name]) for name in ("tool_call_id", "name") if given.get(name) is not None
    }


def _call(block: ToolCallBlock) -> dict[str, Any]:
    call = ToolCall(block.tool_call_id or "", block.tool_name, {}).to_dict()
    call["function"]["arguments"] = block.tool_kwargs
    return call
