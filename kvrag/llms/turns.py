"""Turns of a conversation, as a chat template takes them."""

from __future__ import annotations

from collections.abc import Iterable

TURN_SEPARATOR = "\n\n"
"""Separator between merged turns of one role."""


def merge_turns(turns: Iterable[tuple[str, str]]) -> list[dict[str, str]]:
    """Return the role and content of each turn; neighbours of one role become one turn.

    Most chat templates reject two turns of one role in a row, but chains and query engines
    produce them.

    Parameters
    ----------
    turns
        Role and text, in order.
    """
    merged: list[dict[str, str]] = []
    for role, text in turns:
        if merged and merged[-1]["role"] == role:
            merged[-1]["content"] += TURN_SEPARATOR + text
        else:
            merged.append({"role": role, "content": text})
    return merged
