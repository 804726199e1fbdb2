"""Attention of one key head after another, for callers that observe weights.

Only a few rows' scores exist at a time, over all keys that they may see. `attend_by_rows` takes all
heads at once, for a GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvrag.native import Scores

# Rows whose scores are held at a time for one key head: 4 MB a query head at 32,000 keys.
_ROWS_AT_ONCE = 32
# On a GPU, for all heads together: 256 MB, and as much for each step between them and the weights.
_SCORES_AT_ONCE = 1 << 26

Observe = Callable[[slice, torch.Tensor, torch.Tensor], None]
"""Receives which rows r read with weights ``[G, r, K]`` from a key head's ``[K, D]``, float32."""


def attend_by_head(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    allowed: torch.Tensor,
    scores_of: Scores,
    *,
    sinks: torch.Tensor | None = None,
    observe: Observe | None = None,
) -> torch.Tensor:
    """Return ``[1, n, heads, D]``, as Transformers' attention functions do.

    Parameters
    ----------
    query, key, value
        ``[1, G * H, n, D]`` and ``[1, H, K, D]``.
    allowed
        ``[n, K]`` bool: which rows see which keys.
    scores_of
        How keys are weighed; `allowed` has the window.
    sinks
        ``[G * H]``: the score of what a head sees besides keys, if the model has one.
    observe
        Called for each key head in turn, and for its rows in order.
    """
    _, num_heads, num_rows, head_dim = query.shape
    num_kv_heads, num_keys = key.shape[1], key.shape[2]
    grouped = query.view(num_kv_heads, -1, num_rows, head_dim)
    output = query.new_empty(num_rows, num_heads, value.shape[-1])
    by_head = output.view(num_rows, num_kv_heads, -1, value.shape[-1])
    blocks = [slice(begin, begin + _ROWS_AT_ONCE) for begin in range(0, num_rows, _ROWS_AT_ONCE)]
    # Keys that all rows of a block see need no mask: nearly all keys for a prompt's last rows.
    first_hidden = [_first_hidden(allowed[rows]) for rows in blocks]
    for head in range(num_kv_heads):
        keys, values = key[0, head].float().T, value[0, head].float()
        for rows, tail in zip(blocks, first_hidden, strict=True):
            asking = grouped[head, :, rows].float() * scores_of.scale
            scores = (asking.flatten(0, 1) @ keys).view(*asking.shape[:2], num_keys)
            if scores_of.softcap:
                scores = torch.tanh(scores / scores_of.softcap) * scores_of.softcap
            scores[..., tail:].masked_fill_(~allowed[rows, tail:], float("-inf"))
            own = None if sinks is None else sinks.view(num_kv_heads, -1)[head]
            weights = _softmax(scores, own)
            taken = (weights.flatten(0, 1) @ values).view(*asking.shape[:2], -1)
            by_head[rows, head] = taken.transpose(0, 1).to(output.dtype)
            if observe is not None:
                observe(rows, weights, values)
    return output[None]


def attend_by_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    allowed: torch.Tensor,
    scores_of: Scores,
    first_row: int,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `attend_by_head` does, all heads at once, and what each key gets: for a GPU.

    Parameters
    ----------
    query, key, value, allowed, scores_of, sinks
        As for `attend_by_head`.
    first_row
        The first of the rows whose weights count.

    Returns
    -------
    tensor, tensor
        The output ``[1, n, heads, D]``, and the weights ``[H, K]`` float32, summed over rows from
        `first_row` on and over the query heads of a key head.
    """
    _, num_heads, num_rows, head_dim = query.shape
    num_kv_heads, num_keys = key.shape[1], key.shape[2]
    grouped = query.view(num_kv_heads, -1, num_rows, head_dim)
    keys, values = key[0].float().transpose(1, 2), value[0].float()
    mass = torch.zeros(num_kv_heads, num_keys, device=key.device)
    outputs = []
    size = max(1, _SCORES_AT_ONCE // (num_heads * num_keys))
    for begin in range(0, num_rows, size):
        rows = slice(begin, begin + size)
        asking = grouped[:, :, rows].float() * scores_of.scale
        scores = (asking.flatten(1, 2) @ keys).view(*asking.shape[:3], num_keys)
        if scores_of.softcap:
            scores = torch.tanh(scores / scores_of.softcap) * scores_of.softcap
        own = None if sinks is None else sinks.view(num_kv_heads, -1)
        weights = _softmax(scores.masked_fill_(~allowed[rows], float("-inf")), own)
        mass += weights[:, :, max(0, first_row - begin) :].sum((1, 2))
        taken = (weights.flatten(1, 2) @ values).view(*asking.shape[:3], -1)
        # [H, G, r, D] -> [r, H, G, D]
        outputs.append(taken.permute(2, 0, 1, 3).to(query.dtype))
    return torch.cat(outputs).view(1, num_rows, num_heads, value.shape[-1]), mass


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Return the weights of scores ``[..., G, r, K]``, beside a sink for each of G, if any."""
    if sinks is None:
        return scores.softmax(-1)
    beside = sinks.float()[..., None, None].expand(*scores.shape[:-1], 1)
    return torch.cat([scores, beside], -1).softmax(-1)[..., :-1]


def _first_hidden(allowed: torch.Tensor) -> int:
    """Return how many of the first keys all rows see."""
    return int(allowed.all(0).int().cumprod(0).sum())
