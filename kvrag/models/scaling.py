"""Attention with a separate temperature and scale for reused keys.

Source: Yang et al., APE (arXiv 2502.05431) §4: separately encoded chunks draw attention differently
from a joint prefill's. Their scores are divided by a temperature, and the logarithm of their total
weight (log-sum-exp) is multiplied by a scale before the softmax over all keys.

Deviations: only reused keys that are wrong at their place are scaled. A chunk at the place where it
was encoded is not, nor are recomputed rows.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from kvrag.kvcache import FusedKV
from kvrag.models.headwise import attend_by_head
from kvrag.models.implementations import (
    AttentionFunction,
    attending_by,
    register_around,
)

_NAME = "kvrag_scaled"

_present = threading.local()


@dataclass(frozen=True)
class KeyScaling:
    """The scaling of reused keys.

    Attributes
    ----------
    temperature
        Divisor of their scores, above 0.
    scale
        Factor of their log-sum-exp, 0 or more. At 1 and 1, attention is the ordinary one.
    """

    temperature: float
    scale: float


@dataclass(frozen=True)
class ScaledKeys:
    """The scaled keys of one layer, and their scaling.

    Attributes
    ----------
    scaling
        Temperature and scale.
    reused
        ``[N]`` bool by position; keys after these are not reused.
    """

    scaling: KeyScaling
    reused: torch.Tensor

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        allowed: torch.Tensor,
        scaling: float | None,
        softcap: float | None,
        *,
        first_key: int = 0,
    ) -> torch.Tensor:
        """Return ``[1, n, heads, D]``; the other parameters are those of `attend_by_head`.

        Parameters
        ----------
        first_key
            The position of the first key.
        """
        num_keys = key.shape[2]
        reused = torch.zeros(num_keys, dtype=torch.bool, device=key.device)
        mine = self.reused[first_key : first_key + num_keys]
        reused[: len(mine)] = mine
        rescore = partial(self._scaled, reused)
        return attend_by_head(query, key, value, allowed, scaling, softcap, rescore=rescore)

    def _scaled(self, reused: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        cooled = scores / self.scaling.temperature
        together = cooled.masked_fill(~reused, float("-inf")).logsumexp(-1, keepdim=True)
        # If no reused key is seen, there is nothing to scale.
        shift = torch.where(together.isfinite(), (self.scaling.scale - 1.0) * together, 0.0)
        return torch.where(reused, cooled + shift, scores)


@contextmanager
def scaled_answers(
    model: PreTrainedModel, fused: FusedKV, layers: tuple[ScaledKeys, ...]
) -> Iterator[None]:
    """Make the model's own forwards in this thread attend to a fused prompt's keys with scaling.

    Hold the model's lock. Generation after a prompt then uses the attention that the prompt was
    fused with. Forwards over any other buffer stay ordinary.

    Parameters
    ----------
    fused
        The prompt's buffer.
    layers
        One entry for each layer; empty changes nothing.
    """
    if not layers:
        yield
        return
    before = getattr(_present, "prompt", None)
    _present.prompt = fused, layers
    try:
        with attending_by(model, _NAME):
            yield
    finally:
        _present.prompt = before


def _attend(
    ordinary: AttentionFunction,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None,
    kwargs: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    prompt: tuple[FusedKV, tuple[ScaledKeys, ...]] | None = getattr(_present, "prompt", None)
    layer_index: Any = module.layer_idx
    # A forward in another thread, or over keys other than the prompt's, belongs to another caller.
    if prompt is None or not _is_part(key, prompt[0].keys[layer_index]):
        return ordinary(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    num_rows, num_keys = query.shape[2], key.shape[2]
    if attention_mask is None:
        # Left out if it says only that rows see all keys before them.
        allowed = torch.ones(num_rows, num_keys, dtype=torch.bool, device=key.device)
        allowed = allowed.tril(num_keys - num_rows)
    elif attention_mask.dtype == torch.bool:
        allowed = attention_mask[0, 0, :, :num_keys]
    else:
        allowed = attention_mask[0, 0, :, :num_keys] == 0
    softcap = kwargs.get("softcap")
    output = prompt[1][layer_index].attend(query, key, value, allowed, scaling, softcap)
    return output, None


def _is_part(tensor: torch.Tensor, whole: torch.Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


register_around(_NAME, _attend)
