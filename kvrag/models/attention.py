"""Attention of selected rows over a whole prompt's keys, inside unmodified decoder layers.

While rows are being recomputed, the model's configuration names `ROW_ATTENTION` as its
attention implementation (Transformers' own extension point), and the attention mask handed to
the layers is a `RowMask`: they pass it through untouched, so no mask of prompt length squared
exists anywhere and the selected queries need not be contiguous.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

ROW_ATTENTION = "kvrag_rows"


@dataclass(frozen=True)
class RowMask:
    """Which keys a block of selected rows may see.

    Attributes
    ----------
    positions
        ``[n]`` global positions of the query rows, ascending.
    first_key
        Global position of the first key handed to attention (later for sliding windows).
    window
        Width of the layer's sliding window in tokens, or None.
    """

    positions: torch.Tensor
    first_key: int
    window: int | None

    def dense(self, num_keys: int) -> torch.Tensor:
        """Return the boolean mask ``[n, num_keys]``: key_position <= query_position, in window."""
        keys = torch.arange(self.first_key, self.first_key + num_keys, device=self.positions.device)
        queries = self.positions[:, None]
        mask = keys <= queries
        if self.window is not None:
            mask &= keys > queries - self.window
        return mask


def _row_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: RowMask,
    scaling: float | None = None,
    dropout: float = 0.0,  # noqa: ARG001  # evaluation only
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    mask = attention_mask.dense(key.shape[2])
    if kwargs.get("softcap") is not None:
        # Only the family's own eager function knows its soft-capping.
        eager: Callable[..., Any] = sys.modules[type(module).__module__].__dict__[
            "eager_attention_forward"
        ]
        additive = torch.zeros(mask.shape, dtype=query.dtype, device=query.device)
        additive.masked_fill_(~mask, torch.finfo(query.dtype).min)
        output, _ = eager(
            module, query, key, value, additive[None, None], scaling=scaling, **kwargs
        )
        return output, None
    _, num_heads, num_rows, head_dim = query.shape
    num_kv_heads = key.shape[1]
    num_groups = num_heads // num_kv_heads
    # Query heads that share a key head become a batch over the *same* keys: expand() copies
    # nothing, whereas Transformers' repeat_kv would copy every key of the prompt per group.
    grouped = query.view(num_kv_heads, num_groups, num_rows, head_dim).transpose(0, 1)
    output = scaled_dot_product_attention(
        grouped,
        key.expand(num_groups, -1, -1, -1),
        value.expand(num_groups, -1, -1, -1),
        attn_mask=mask,
        scale=scaling,
    )
    # [G, H, n, D] -> [1, n, H * G, D], the order in which the output projection expects heads.
    return output.permute(2, 1, 0, 3).reshape(1, num_rows, num_heads, head_dim), None


AttentionInterface.register(ROW_ATTENTION, _row_attention)


@contextmanager
def row_attention(model: PreTrainedModel) -> Iterator[None]:
    """Make `model` use row attention inside the block. Not reentrant: hold the model's lock."""
    config = model.config
    original = config._attn_implementation
    config._attn_implementation = ROW_ATTENTION
    try:
        yield
    finally:
        config._attn_implementation = original
