"""Attention of one key head after another, for callers that change scores or observe weights.

Only a few rows' scores exist at a time, over all keys that they may see.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

# Rows whose scores are held at a time for one key head: 4 MB a query head at 32,000 keys.
_ROWS_AT_ONCE = 32

Rescore = Callable[[torch.Tensor], torch.Tensor]
"""Returns changed scores ``[G, r, K]`` float32; keys that a row does not see have -inf."""

Observe = Callable[[slice, torch.Tensor, torch.Tensor], None]
"""Receives which rows r read with weights ``[G, r, K]`` from a key head's ``[K, D]``, float32."""


def attend_by_head(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    allowed: torch.Tensor,
    scaling: float | None,
    softcap: float | None,
    *,
    rescore: Rescore | None = None,
    observe: Observe | None = None,
) -> torch.Tensor:
    """Return ``[1, n, heads, D]``, as Transformers' attention functions do.

    Parameters
    ----------
    query, key, value
        ``[1, G * H, n, D]`` and ``[1, H, K, D]``.
    allowed
        ``[n, K]`` bool: which rows see which keys.
    scaling
        Factor of the scores; None means ``D ** -0.5``.
    softcap
        Soft cap of the scores, if the model has one.
    rescore
        Changes the scores before their softmax.
    observe
        Called for each key head in turn, and for its rows in order.
    """
    _, num_heads, num_rows, head_dim = query.shape
    num_kv_heads, num_keys = key.shape[1], key.shape[2]
    grouped = query.view(num_kv_heads, -1, num_rows, head_dim)
    factor = head_dim**-0.5 if scaling is None else scaling
    output = query.new_empty(num_rows, num_heads, value.shape[-1])
    by_head = output.view(num_rows, num_kv_heads, -1, value.shape[-1])
    blocks = [slice(begin, begin + _ROWS_AT_ONCE) for begin in range(0, num_rows, _ROWS_AT_ONCE)]
    # Keys that all rows of a block see need no mask: nearly all keys for a prompt's last rows.
    first_hidden = [_first_hidden(allowed[rows]) for rows in blocks]
    for head in range(num_kv_heads):
        keys, values = key[0, head].float().T, value[0, head].float()
        for rows, tail in zip(blocks, first_hidden, strict=True):
            asking = grouped[head, :, rows].float() * factor
            scores = (asking.flatten(0, 1) @ keys).view(*asking.shape[:2], num_keys)
            if softcap is not None:
                scores = torch.tanh(scores / softcap) * softcap
            scores[..., tail:].masked_fill_(~allowed[rows, tail:], float("-inf"))
            weights = (scores if rescore is None else rescore(scores)).softmax(-1)
            taken = (weights.flatten(0, 1) @ values).view(*asking.shape[:2], -1)
            by_head[rows, head] = taken.transpose(0, 1).to(output.dtype)
            if observe is not None:
                observe(rows, weights, values)
    return output[None]


def _first_hidden(allowed: torch.Tensor) -> int:
    """Return how many of the first keys all rows see."""
    return int(allowed.all(0).int().cumprod(0).sum())
