"""Masks and biases for families whose layers attend in their own code.

BLOOM, MPT and Falcon do not use Transformers' attention interface. Selected rows therefore reach
them as a mask in the shape that their own forward passes to their layers.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from kvrag.models.attention import AttentionObserver, RowMask
from kvrag.models.decoders import Model
from kvrag.positions.rotary import AlibiTable, RotaryTable

if TYPE_CHECKING:
    pass


def layer_arguments(hf: Model, mask: RowMask, num_keys: int, table: RotaryTable) -> dict[str, Any]:
    """Return a decoder layer's arguments besides hidden states and cache.

    Parameters
    ----------
    mask
        The rows' mask.
    num_keys
        Number of keys that the rows attend to, from the mask's first key on.
    table
        The layer's table, over all rows.
    """
    kind = hf.config.model_type
    allowed = mask.dense(num_keys)[None, None]
    bias = None
    if isinstance(table, AlibiTable):
        bias = table.bias[:, None, mask.first_key : mask.first_key + num_keys]
    if kind == "mpt":
        return {"attention_mask": ~allowed, "position_bias": bias}
    lowest = torch.finfo(hf.dtype).min
    additive = torch.zeros(allowed.shape, dtype=hf.dtype, device=allowed.device)
    additive.masked_fill_(~allowed, lowest)
    if kind == "bloom":
        return {"attention_mask": additive, "alibi": bias}
    arguments: dict[str, Any] = {
        "attention_mask": additive,
        "alibi": None,
        "position_ids": mask.positions[None],
        # The only one of Falcon's code paths that returns its weights.
        "output_attentions": mask.observer is not None,
    }
    if bias is None:
        arguments["position_embeddings"] = table.embeddings(mask.positions, hf.dtype)
        return arguments
    arguments["alibi"] = bias[None]
    if mask.observer is not None and hf.config._attn_implementation == "sdpa":
        # The code that returns its weights adds the bias, which the other code leaves to the mask.
        return arguments
    # Falcon's model folds the bias into the mask, and passes it on separately as well.
    head_dim = hf.config.hidden_size // hf.config.num_attention_heads
    folded = (bias[None] / math.sqrt(head_dim)).expand(-1, -1, allowed.shape[2], -1)
    arguments["attention_mask"] = folded.masked_fill(~allowed, lowest)
    return arguments


def show_weights(
    observer: AttentionObserver, mask: RowMask, weights: torch.Tensor, values: torch.Tensor
) -> None:
    """Show an observer the weights and values that a layer attended with.

    Parameters
    ----------
    weights
        ``[1, heads, n, K]``.
    values
        ``[1, H, C, D]``, the layer's values in the buffer.
    """
    num_kv_heads, num_keys = values.shape[1], weights.shape[3]
    shown = values[0, :, mask.first_key : mask.first_key + num_keys]
    grouped = weights[0].view(num_kv_heads, -1, *weights.shape[2:])
    for head in range(num_kv_heads):
        observer(mask, slice(0, weights.shape[2]), grouped[head].float(), shown[head].float())
