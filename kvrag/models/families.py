"""The differences between the supported decoder families, in one table.

A family is supported if its layers can be called one by one with our cache and its oracle test
(`tests/models/test_oracles.py`) is green. Everything that this table does not name (q/k norms, GQA,
biases, fused projections, soft-capping of attention) is left to the layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from kvrag.arguments import shown
from kvrag.errors import UnsupportedModelError
from kvrag.models.caches import CACHE_ARGUMENT


@dataclass(frozen=True)
class Family:
    """How to reach one family's modules.

    Attributes
    ----------
    cache_argument
        Name of a decoder layer's cache argument.
    final_norm
        Attribute of the base model: the norm after the last layer.
    rotary_per_layer_type
        Whether the rotary module holds one set of frequencies per layer type.
    windowed
        Whether its layers use ``config.sliding_window``; other families ignore a stray one.
    layers
        Attribute of the base model: the decoder layers.
    embedding_norm
        Attribute of the base model: the norm of embedded tokens, if any.
    position_embedding
        Attribute of the base model: learned positions, if any.
    attends_itself
        Whether its layers attend in their own code, not through Transformers' interface.
    """

    cache_argument: str = CACHE_ARGUMENT
    final_norm: str = "norm"
    rotary_per_layer_type: bool = False
    windowed: bool = True
    layers: str = "layers"
    embedding_norm: str | None = None
    position_embedding: str | None = None
    attends_itself: bool = False


FAMILIES: dict[str, Family] = {
    "llama": Family(windowed=False),
    "mistral": Family(),
    "qwen2": Family(),
    "qwen3": Family(),
    "phi3": Family(),
    "gemma2": Family(),
    "gemma3_text": Family(rotary_per_layer_type=True),
    "gpt_neox": Family(cache_argument="layer_past", final_norm="final_layer_norm", windowed=False),
    "gpt2": Family(final_norm="ln_f", windowed=False, layers="h", position_embedding="wpe"),
    "bloom": Family(
        cache_argument="layer_past",
        final_norm="ln_f",
        windowed=False,
        layers="h",
        embedding_norm="word_embeddings_layernorm",
        attends_itself=True,
    ),
    "mpt": Family(
        cache_argument="layer_past",
        final_norm="norm_f",
        windowed=False,
        layers="blocks",
        attends_itself=True,
    ),
    "falcon": Family(
        cache_argument="layer_past",
        final_norm="ln_f",
        windowed=False,
        layers="h",
        attends_itself=True,
    ),
}

_WHY_NOT = {
    "opt": "learned positions that begin at 2",
    "gptj": "interleaved rotary channels",
    "gemma3": "image inputs; load its text model (gemma3_text) instead",
    "mixtral": "mixture-of-experts layers",
    **dict.fromkeys(
        ("jamba", "mamba", "mamba2", "bamba", "falcon_h1", "zamba2", "nemotron_h", "lfm2"),
        "state-space or convolution layers, whose state is that of a whole prompt and cannot be "
        "put together from chunks",
    ),
    **dict.fromkeys(
        ("qwen3_next", "minimax", "granitemoehybrid"),
        "linear attention or state-space layers, whose state is that of a whole prompt and cannot "
        "be put together from chunks",
    ),
}


def find_family(model: PreTrainedModel) -> Family:
    """Return a model's family. Raises UnsupportedModelError that names what is missing."""
    model_type = model.config.model_type
    family = FAMILIES.get(model_type)
    if family is None:
        missing = _WHY_NOT.get(model_type, "no oracle test for it exists yet")
        raise UnsupportedModelError(
            f"model type {shown(model_type)} is not supported: {missing}. "
            f"Supported: {', '.join(sorted(FAMILIES))}"
        )
    if model_type == "mpt" and not model.config.attn_config.alibi:
        raise UnsupportedModelError("an MPT model without ALiBi has no positions to serve")
    if getattr(model.config, "use_bidirectional_attention", False):
        raise UnsupportedModelError(
            f"{shown(model_type)} with use_bidirectional_attention has no causal KV to reuse"
        )
    return family


def has_alibi(config: PreTrainedConfig) -> bool:
    """Return whether a model encodes positions as a bias of its attention."""
    if config.model_type == "mpt":
        return bool(config.attn_config.alibi)
    return config.model_type == "bloom" or bool(getattr(config, "alibi", False))


def num_kv_heads(config: PreTrainedConfig) -> int:
    """Return H, the number of key heads in a model's cache."""
    if config.model_type == "falcon":
        # With the new architecture its layers cache every key head once for each query head.
        is_shared = config.multi_query and not config.new_decoder_architecture
        return 1 if is_shared else int(config.num_attention_heads)
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


_BLOOM_WINDOW = 2048
"""BLOOM's trained length; its configurations give it as ``seq_length`` or not at all."""


def context_window(config: PreTrainedConfig) -> int:
    """Return the number of positions that a model supports."""
    if config.model_type == "mpt":
        return int(config.max_seq_len)
    if config.model_type == "bloom":
        return int(getattr(config, "seq_length", _BLOOM_WINDOW))
    return int(config.max_position_embeddings)


def sliding_windows(model: PreTrainedModel) -> list[int | None]:
    """Return each layer's attention window in tokens, None if it sees everything."""
    config = model.config
    if not find_family(model).windowed:
        return [None] * config.num_hidden_layers
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        return [window] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in layer_types]


def project_logits(model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
    """Return logits ``[..., vocabulary]`` of normed hidden states, as the model's forward does."""
    head: nn.Module = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    logits: torch.Tensor = head(hidden)
    cap = getattr(model.config, "final_logit_softcapping", None)
    return logits if cap is None else torch.tanh(logits / cap) * cap
