"""A model's positions: its own rotary module, its own ALiBi bias, or learned ones.

How layers use what the rotary module gives is measured, not looked up by a family's name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

import torch
from torch import nn

from kvrag.arguments import shown
from kvrag.errors import UnsupportedModelError
from kvrag.kvcache import KVSpec, packed
from kvrag.models.decoders import Model
from kvrag.models.families import INSTEAD, Family, base_of, has_alibi
from kvrag.models.writers import ProjectionDone, ProjectionProbe
from kvrag.positions.rotary import LAYOUTS, Layout, RotaryPositions, UnrotatedPositions

_IN_HALVES = {"llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3_text", "falcon"}
"""Types that are known to rotate all layers in halves: nothing is measured when they are loaded."""
_PLACE = 3
"""Where a key is turned to: near enough that the first frequencies have not come around."""


Positions: TypeAlias = RotaryPositions | UnrotatedPositions


def find_positions(hf: Model, family: Family, spec: KVSpec) -> Positions:
    """Return the positions of a model. Raises UnsupportedModelError as `RotaryPositions` does."""
    if has_alibi(hf.config):
        return UnrotatedPositions(spec.num_layers, spec.head_dim, _alibi(hf))
    if family.position_embedding is not None:
        return UnrotatedPositions(spec.num_layers, spec.head_dim)
    base: Any = base_of(hf)
    layer_types: Sequence[str | None] = [None] * spec.num_layers
    if family.rotary_per_layer_type:
        layer_types = hf.config.layer_types
    rotary = RotaryPositions(cast("nn.Module", base.rotary_emb), layer_types)
    if hf.config.model_type in _IN_HALVES:
        return rotary
    layers: Sequence[nn.Module] = getattr(base, family.layers)
    layouts = [
        _layout_of(hf, family, spec, index, layer, rotary, layer_type)
        for index, (layer, layer_type) in enumerate(zip(layers, layer_types, strict=True))
    ]
    return RotaryPositions(base.rotary_emb, layer_types, layouts)


@torch.no_grad()
def _layout_of(
    hf: Model,
    family: Family,
    spec: KVSpec,
    index: int,
    layer: nn.Module,
    rotary: RotaryPositions,
    layer_type: str | None,
) -> Layout:
    """Return how a layer rotates keys: one row's key at two places tells it."""
    positions = torch.tensor([0, _PLACE], device=hf.device)
    made = torch.Generator().manual_seed(index)
    hidden = torch.randn(1, 1, hf.config.hidden_size, generator=made).expand(-1, 2, -1)
    given = rotary.given(positions, layer_type, hf.dtype)
    try:
        layer(
            hidden.to(hf.device, hf.dtype),
            attention_mask=None,
            position_ids=positions[None],
            position_embeddings=given if len(given) > 1 else given[0],
            **{family.cache_argument: ProjectionProbe()},
        )
    except ProjectionDone as done:
        keys = packed(spec.latent, done.keys, done.values)[0][0].float()
    except Exception as error:  # whatever the layer does with what it was not given
        raise UnsupportedModelError(
            f"{shown(hf.config.model_type)} is not supported: layer {index} takes more than rows "
            f"and their positions ({type(error).__name__}: {str(error)[:200]}). {INSTEAD}"
        ) from error
    else:
        raise UnsupportedModelError(
            f"layer {index} of {shown(hf.config.model_type)} keeps no keys and values in the "
            "cache, and kvrag stores nothing else"
        )
    wide, best, least = rotary.given(positions, layer_type), Layout(), float("inf")
    for layout in LAYOUTS:
        table = layout.table(wide)
        if table.cos.shape[-1] > keys.shape[-1]:
            continue
        free, placed = torch.empty_like(keys), torch.empty_like(keys)
        table.strip(keys[:, [0, 0]], torch.tensor([0, 0]), free)
        table.place(free, slice(None), placed)
        off = float((placed - keys)[:, 1].norm() / keys[:, 1].norm())
        if off < least:
            best, least = layout, off
    if not least < (1e-3 if hf.dtype == torch.float32 else 0.05):
        raise UnsupportedModelError(
            f"layer {index} of {shown(hf.config.model_type)} turns keys in a way that kvrag does "
            f"not know: the nearest known way is off by {least:.1%}, and keys have to be moved "
            "exactly"
        )
    return best


def _alibi(hf: Model) -> Callable[[int], torch.Tensor]:
    """Return the model's own bias function, number of positions to ``[heads, positions]``."""
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor as of_bloom
    from transformers.models.falcon.modeling_falcon import build_alibi_tensor as of_falcon
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor as of_mpt

    num_heads: int = hf.config.num_attention_heads

    def bias(num_positions: int) -> torch.Tensor:
        if hf.config.model_type == "mpt":
            # Called as the model does; it omits the configuration's own alibi_bias_max.
            return cast("torch.Tensor", of_mpt(num_heads, num_positions))[:, 0]  # type: ignore[no-untyped-call]
        build = of_bloom if hf.config.model_type == "bloom" else of_falcon
        ones = torch.ones(1, num_positions, dtype=torch.long)
        return build(ones, num_heads, hf.dtype)[:, 0]

    return bias
