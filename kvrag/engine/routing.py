"""The key by which a proxy sends prompts with the same chunks to the same replica."""

from __future__ import annotations

from collections.abc import Iterable

ROUTE_HEADER = "X-KVRag-Route"
"""The HTTP header that carries the key."""


def route_key(chunk_ids: Iterable[str]) -> str:
    """Return the key of a prompt: its smallest chunk id, or "" without chunks.

    Ids are digests. So two prompts have the same key about as often as the share of chunks that
    they have in common (MinHash), whatever the order.

    Parameters
    ----------
    chunk_ids
        Ids of the chunks in the prompt.
    """
    return min(chunk_ids, default="")
