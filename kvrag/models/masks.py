"""A boolean mask in the shape that a model takes."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from kvrag.models.families import sliding_windows


def model_masks(
    hf: PreTrainedModel, allowed: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor
) -> Any:
    """Return the model's mask argument: one mask for all layers, or one for each layer type.

    Parameters
    ----------
    hf
        The model.
    allowed
        ``[B, q, k]`` bool: which rows see which, without the layers' windows.
    queries, keys
        ``[B, q]`` and ``[B, k]``: positions, for the layers' windows.
    """
    layer_windows = sliding_windows(hf)
    windows = set(layer_windows)
    found = {
        window: _as_model_wants(
            hf,
            allowed if window is None else allowed & (keys[:, None] > queries[:, :, None] - window),
        )
        for window in windows
    }
    if len(found) == 1:
        return found[layer_windows[0]]
    sliding = next(window for window in windows if window is not None)
    return {"full_attention": found[None], "sliding_attention": found[sliding]}


def _as_model_wants(hf: PreTrainedModel, allowed: torch.Tensor) -> torch.Tensor:
    if hf.config._attn_implementation != "eager":
        return allowed[:, None]
    additive = torch.zeros(allowed.shape, dtype=hf.dtype, device=allowed.device)
    return additive.masked_fill_(~allowed, torch.finfo(hf.dtype).min)[:, None]
