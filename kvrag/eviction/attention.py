"""Attention over the keys that an evicting cache has left, inside unmodified decoder layers.

While the cache is in use, the model's configuration names our attention implementation, through
Transformers' extension point. A layer gives its cache the fresh keys, gets them back unchanged, and
passes them to attention. Attention recognises the cache's layer by these keys. Prompts attend with
the model's own implementation, and the policy sees the weights of their last queries. Later tokens
attend to the keys that each head has left.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from transformers import PreTrainedModel

from kvrag.eviction.ragged import RaggedKV
from kvrag.models.implementations import (
    AttentionCall,
    attending_by,
    register_around,
)

_NAME = "kvrag_evicting"
# At most this many attention weights of a prompt's last queries are in memory at a time (8 MB), but
# at least one query's.
_WEIGHTS_AT_ONCE = 1 << 21


class AttendedLayer(Protocol):
    """The methods of a cache's layer that attention calls."""

    @property
    def is_empty(self) -> bool:
        """Whether the layer has no prompt yet."""
        ...

    def take_prompt(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        allowed: torch.Tensor | None,
        score: Score,
    ) -> None:
        """Keep those of a prompt's keys and values that the policy does not evict."""
        ...

    def step(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        allowed: torch.Tensor | None,
        score: Score,
    ) -> torch.Tensor:
        """Add tokens one by one; return the output of their attention, ``[B, n, heads, D]``."""
        ...


class Score:
    """How a model's layer weighs keys: scaling and soft-capping."""

    def __init__(self, scaling: float, softcap: float | None) -> None:
        self.scaling = scaling
        self._softcap = softcap

    def cap(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores, soft-capped if the model caps them."""
        if self._softcap is None:
            return scores
        return torch.tanh(scores / self._softcap) * self._softcap


class _Present(threading.local):
    """The state of this thread's forward pass."""

    depth = 0
    layer: AttendedLayer | None = None
    keys: torch.Tensor | None = None


_present = _Present()


@contextmanager
def evicting_attention(model: PreTrainedModel) -> Iterator[None]:
    """Make the model's forwards in this thread use evicting caches. Holds the model's lock."""
    _present.depth += 1
    try:
        with attending_by(model, _NAME):
            yield
    finally:
        _present.depth -= 1
        _present.layer = _present.keys = None


def is_serving() -> bool:
    """Whether this thread is inside `evicting_attention`."""
    return _present.depth > 0


def hand_on(layer: AttendedLayer, keys: torch.Tensor) -> None:
    """Let `layer` handle the next attention to these keys."""
    _present.layer, _present.keys = layer, keys


def observed_queries(
    query: torch.Tensor, key: torch.Tensor, visible: torch.Tensor, score: Score
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the attention weights of some queries of one prompt, a few queries at a time.

    Parameters
    ----------
    query
        ``[G * H, r, D]``, in order.
    key
        ``[H, N, D]``.
    visible
        ``[r, N]`` bool: which keys each query sees.

    Yields
    ------
    tensor, tensor
        The weights ``[H, G, q, N]`` float32, and ``[q]``: how many keys each query sees.
    """
    num_kv_heads, num_keys, head_dim = key.shape
    grouped = query.view(num_kv_heads, -1, *query.shape[1:])
    at_once = max(1, _WEIGHTS_AT_ONCE // (len(query) * num_keys))
    keys = key.float().transpose(1, 2) * score.scaling
    for seen, asking in zip(
        torch.split(visible, at_once), torch.split(grouped, at_once, dim=2), strict=True
    ):
        rows = asking.float().reshape(num_kv_heads, -1, head_dim) @ keys
        weights = score.cap(rows.view(*asking.shape[:3], num_keys))
        yield weights.masked_fill_(~seen, float("-inf")).softmax(-1), seen.sum(-1)


# From this many query heads for each key head, products with query heads as rows are faster than
# products with keys as rows.
_MANY_GROUPS = 5


def attend_ragged(
    query: torch.Tensor, kv: RaggedKV, score: Score
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with one query for each query head to all keys of its key head.

    Parameters
    ----------
    query
        ``[A, G, D]``.

    Returns
    -------
    tensor, tensor
        The output ``[A, G, D]``, and the weights ``[A, G, k]`` float32 over the first k slots. k is
        the number of keys in the fullest head.
    """
    num_heads, num_groups, _ = query.shape
    asking = query * score.scaling
    heads = [kv.head(head) for head in range(num_heads)]
    most = max(kv.counts)
    if num_groups < _MANY_GROUPS:
        by_key = query.new_empty(num_heads, most, num_groups)
        scores = by_key.transpose(1, 2)
        for head, (keys, _values) in enumerate(heads):
            torch.mm(keys, asking[head].T, out=by_key[head, : len(keys)])
    else:
        scores = query.new_empty(num_heads, num_groups, most)
        for head, (keys, _values) in enumerate(heads):
            torch.mm(asking[head], keys.T, out=scores[head, :, : len(keys)])
    scores = score.cap(scores.float())
    for head, count in enumerate(kv.counts):
        if count < most:
            # After capping, which would turn it into a finite score.
            scores[head, :, count:] = float("-inf")
    weights = scores.softmax(-1)
    taken = weights.to(query.dtype)
    output = torch.empty_like(query)
    for head, (_keys, values) in enumerate(heads):
        torch.mm(taken[head, :, : len(values)], values, out=output[head])
    return output, weights


def _attend(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor | None]:
    query, key, value = call.query, call.key, call.value
    layer = _present.layer if _present.keys is key else None
    if layer is None:
        # A forward in another thread, or with another cache.
        return call.plainly()
    _present.layer = _present.keys = None
    scale = query.shape[-1] ** -0.5 if call.scaling is None else call.scaling
    score = Score(scale, call.more.get("softcap"))
    allowed = call.mask
    if allowed is not None:
        allowed = (allowed if allowed.dtype == torch.bool else allowed == 0)[:, 0]
    if not layer.is_empty:
        return layer.step(query, key, value, allowed, score), None
    output = call.plainly()
    layer.take_prompt(query, key, value, allowed, score)
    return output


register_around(_NAME, _attend)
