"""The multiplications that fusing a prompt spends, against those that its rows need."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop

from kvrag.fusion.fuser import FusedPrompt
from kvrag.models import attention
from kvrag.models.kv_model import KVModel
from kvrag.models.linears import PackedWeight
from kvrag.native.attention import Scores, attend
from kvrag.native.linear import FewRowsLinear, Int8Linear


def operations_spent(work: Callable[[], object]) -> int:
    """Return the multiplications and additions of all matrix products that `work` carries out.

    Those of attention in PyTorch count whether a mask hides their result or not. The compiled
    kernel, which PyTorch does not see, carries out only those of keys that a row sees.
    """
    counter = FlopCounterMode(
        display=False,
        # PyTorch prices its GPU kernels only.
        custom_mapping={torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _on_cpu},
    )
    unseen = 0

    def counting(compute: Callable[..., Any], price: Callable[..., int]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            nonlocal unseen
            before = counter.get_total_flops()
            result = compute(*arguments, **options)
            # Where no kernels were compiled, PyTorch sees the products of their reference.
            unseen += price(result, *arguments) - (counter.get_total_flops() - before)
            return result

        return counted

    with ExitStack() as stack:
        stack.enter_context(counter)
        stack.enter_context(patch.object(attention, "attend", counting(attend, _in_attention)))
        for layer in (FewRowsLinear, Int8Linear, PackedWeight):
            counted = counting(layer.__call__, _in_linear)
            stack.enter_context(patch.object(layer, "__call__", counted))
        work()
    return int(counter.get_total_flops()) + unseen


def _in_linear(result: torch.Tensor, _: object, rows: torch.Tensor) -> int:
    return 2 * rows.numel() * result.shape[-1]


def _on_cpu(query_shape: Any, key_shape: Any, value_shape: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop(query_shape, key_shape, value_shape))


def _in_attention(
    _: object,
    query: torch.Tensor,
    __: object,
    value: torch.Tensor,
    last_keys: torch.Tensor,
    scores: Scores,
    *___: object,
) -> int:
    num_heads, _, head_dim = query.shape
    num_visible = last_keys + 1
    if scores.window is not None:
        num_visible = num_visible.clamp(max=scores.window)
    return 2 * num_heads * int(num_visible.sum()) * (head_dim + value.shape[-1])


def operations_needed(model: KVModel, fused: FusedPrompt) -> int:
    """Return what it takes to compute the fresh and the chosen rows, each once, in every layer.

    A row needs its layer's linear maps, and attention over the keys up to its own (no sliding
    windows). The last layer needs only K/V, except for the last token, which needs its logits. Rows
    that a policy computes only to choose by are not needed.
    """
    config, spec = model.hf.config, model.spec
    layers: Any = model.hf.base_model.layers
    query_width = config.num_attention_heads * spec.head_dim
    projection = 4 * spec.num_kv_heads * spec.head_dim * config.hidden_size
    head: nn.Linear = model.hf.get_output_embeddings()  # type: ignore[no-untyped-call]
    total = 2 * head.in_features * head.out_features
    for layer_index, layer in enumerate(layers):
        linears = [m for m in layer.modules() if isinstance(m, nn.Linear)]
        linear = 2 * sum(one.in_features * one.out_features for one in linears)
        # Count what was chosen after the first layer; more rows in that one serve the choice.
        picks = fused.picks[max(layer_index, min(1, len(fused.picks) - 1))]
        rows = torch.cat([fused.fresh, picks])
        if layer_index == spec.num_layers - 1:
            total += len(rows) * projection
            rows = rows.max()[None]
        total += len(rows) * linear + 4 * query_width * int((rows + 1).sum())
    return total
