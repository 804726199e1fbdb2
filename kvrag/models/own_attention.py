"""Families whose layers attend in code of their own: what their masks and biases look like.

BLOOM, MPT and Falcon know nothing of Transformers' attention interface, so selected rows reach them
as a mask in the shape that their own forward hands to their layers.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import PreTrainedModel

from kvrag.models.attention import AttentionObserver, RowMask
from kvrag.positions.rotary import RotaryTable
from kvrag.positions.unrotated import AlibiTable


def layer_arguments(
    hf: PreTrainedModel, mask: RowMask, num_keys: int, table: RotaryTable
) -> dict[str, Any]:
    """Return what a decoder layer takes besides hidden states and cache.

    Parameters
    ----------
    mask
        The rows.
    num_keys
        Keys from the mask's first on that they attend to.
    table
        The layer's, over all rows.
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
        # The only way of Falcon's that tells its weights.
        "output_attentions": mask.observer is not None,
    }
    if bias is None:
        arguments["position_embeddings"] = table.embeddings(mask.positions, hf.dtype)
        return arguments
    # Falcon's model folds the bias into the mask, and hands it on beside.
    head_dim = hf.config.hidden_size // hf.config.num_attention_heads
    folded = (bias[None] / math.sqrt(head_dim)).expand(-1, -1, allowed.shape[2], -1)
    arguments["attention_mask"] = folded.masked_fill(~allowed, lowest)
    arguments["alibi"] = bias[None]
    return arguments


def show_weights(
    observer: AttentionObserver, mask: RowMask, weights: torch.Tensor, values: torch.Tensor
) -> None:
    """Show an observer what a layer attended with.

    Parameters
    ----------
    weights
        ``[1, heads, n, K]``.
    values
        ``[1, H, C, D]``, the layer's in the buffer.
    """
    num_kv_heads, num_keys = values.shape[1], weights.shape[3]
    shown = values[0, :, mask.first_key : mask.first_key + num_keys]
    grouped = weights[0].view(num_kv_heads, -1, *weights.shape[2:])
    for head in range(num_kv_heads):
        observer(mask, slice(0, weights.shape[2]), grouped[head].float(), shown[head].float())
