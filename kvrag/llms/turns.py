"""Turns of a conversation, as a chat template takes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

TURN_SEPARATOR = "\n\n"
"""Separator between merged turns of one role."""


def merge_turns(turns: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return turns in which neighbours of one role are one turn.

    Most chat templates reject two turns of one role in a row, but chains and query engines
    produce them. Turns with calls of tools and their results stay as they are.

    Parameters
    ----------
    turns
        Messages with ``role`` and ``content``, in order.
    """
    merged: list[dict[str, Any]] = []
    for turn in turns:
        before = merged[-1] if merged else {}
        if before.keys() == turn.keys() == {"role", "content"} and before["role"] == turn["role"]:
            before["content"] += TURN_SEPARATOR + turn["content"]
        else:
            merged.append(dict(turn))
    return merged
