"""What kvrag needs to know of a decoder family: read from its structure, not from its name.

Layers have to be callable one by one with our cache, attend through Transformers' interface, and
keep keys and values in the cache as they made them. Everything that is not named here (q/k norms,
GQA, biases, experts, sinks, soft-capping of attention) is left to the layer. `TESTED` are the
families whose oracle tests are green (`tests/models/test_oracles.py`, `test_families.py`).
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kvrag.arguments import shown
from kvrag.errors import UnsupportedModelError
from kvrag.kvcache import Latent
from kvrag.models.decoders import Decoder, Model
from kvrag.models.writers import CACHE_ARGUMENT


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


CORE = (
    *("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3_text", "gpt_neox", "gpt2"),
    *("bloom", "mpt", "falcon"),
)
"""Types of models that are also tested in parts of several processes, or inside serving engines."""
TESTED = (
    *CORE,
    *("qwen3_moe", "mixtral", "gpt_oss", "granite", "smollm3", "olmo2", "olmo3", "ministral3"),
    *("gemma", "cohere2", "glm4", "exaone4", "seed_oss", "starcoder2", "stablelm", "phi"),
    *("nemotron", "llama4_text", "deepseek_v3"),
)
"""Types of models that a test compares with plain Transformers, number by number."""

SEES = ("gemma3", "mistral3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""Types of models that also see, of which the text part is tested."""

_ATTEND_THEMSELVES = ("bloom", "mpt", "falcon")
# The names that Transformers' base models have for the same things.
_LAYERS = ("layers", "h", "blocks")
_FINAL_NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f")
_WINDOW_MASKS = ("create_sliding_window_causal_mask", "create_chunked_causal_mask")
_CACHES = (CACHE_ARGUMENT, "past_key_values", "layer_past")

_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
_STATES = (
    "layers of it keep the state of a whole prompt (state space, convolution or linear attention), "
    "which cannot be put together from chunks"
)
_SHARES = (
    "layers of it take keys and values from earlier ones, and some have other heads, but kvrag "
    "stores chunks in one shape"
)
WHOLE = {
    **dict.fromkeys(
        (
            *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "granitemoehybrid", "lfm2"),
            *("lfm2_moe", "falcon_h1", "zamba2", "nemotron_h", "olmo_hybrid"),
        ),
        _STATES,
    ),
    **dict.fromkeys(("gemma3n_text", "gemma4_text"), _SHARES),
}
"""Types whose prompts are computed as wholes (`kvrag.fusion.whole`), and why chunks have no KV."""
_TAKE = "take a model whose layers all attend"
_KEEP_STATES = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
_OTHER_RULE = (
    "in layers of it rows see keys by a rule that kvrag does not know; take a model with full or "
    "sliding attention"
)
WHY_NOT = {
    "opt": "its learned positions begin at 2; take a model with rotary positions",
    "gemma4_unified_text": f"{_SHARES}; take gemma4_text",
    "gptj": "its base model has no rotary module; take gpt_neox or a newer model",
    **dict.fromkeys(
        ("jamba", "mamba", "mamba2", "falcon_mamba", "bamba", "minimax"),
        "layers of it keep the state of a whole prompt, and no test has shown that Transformers "
        f"continues it exactly; {_TAKE}",
    ),
}
"""Types that are refused by name, and what to do."""


class Chunked(int):
    """A window that begins again after this many positions: rows see their chunk of the text.

    As a number it is how far back a row sees at most.
    """


def inside(keys: torch.Tensor, queries: torch.Tensor, window: int | None) -> torch.Tensor | None:
    """Return whether keys are in the window of queries, by their positions; None: all are."""
    if window is None:
        return None
    if isinstance(window, Chunked):
        return keys // int(window) == queries // int(window)
    return keys > queries - window


def base_of(model: Model) -> Any:
    """Return a model without its head."""
    base = model.base_model
    # Llama-4's text model has it under another name than it says.
    return getattr(model, "model", base) if base is model else base


def find_family(model: Model) -> Family:
    """Return a model's family. Raises UnsupportedModelError that names what is missing."""
    model_type = model.config.model_type
    if isinstance(model, Decoder):
        return Family(rotary_per_layer_type=model.has_rope_types)
    refuse_config(model.config)
    if model_type in WHOLE:
        raise UnsupportedModelError(no_chunks(model_type))
    base = base_of(model)
    home: Any = sys.modules[type(base).__module__]
    found = [_first(base, names) for names in (_LAYERS, _FINAL_NORMS)]
    if None in found or not isinstance(getattr(base, str(found[0])), nn.ModuleList):
        raise UnsupportedModelError(
            f"model type {shown(model_type)} is not supported: it is not a stack of decoder layers "
            f"with a norm after them. {INSTEAD}"
        )
    layers, norm = map(str, found)
    arguments = inspect.signature(type(getattr(base, layers)[0]).forward).parameters
    attends_itself = model_type in _ATTEND_THEMSELVES
    cache = next((name for name in _CACHES if name in arguments), None)
    if cache is None or not (attends_itself or hasattr(home, "ALL_ATTENTION_FUNCTIONS")):
        raise UnsupportedModelError(
            f"model type {shown(model_type)} is not supported: its layers attend in their own "
            f"code, not through Transformers' interface. {INSTEAD}"
        )
    rotary = getattr(base, "rotary_emb", None)
    learned = _first(base, ("wpe",))
    if rotary is None and learned is None and not has_alibi(model.config):
        raise UnsupportedModelError(
            f"model type {shown(model_type)} is not supported: its positions are neither rotary, "
            f"nor learned, nor a bias (ALiBi) that kvrag knows. {INSTEAD}"
        )
    return Family(
        cache_argument=cache,
        final_norm=norm,
        rotary_per_layer_type=(
            rotary is not None
            and "layer_type" in inspect.signature(type(rotary).forward).parameters
        ),
        windowed=any(hasattr(home, name) for name in _WINDOW_MASKS),
        layers=layers,
        embedding_norm=_first(base, ("word_embeddings_layernorm",)),
        position_embedding=learned,
        attends_itself=attends_itself,
    )


INSTEAD = (
    "Take a model of a tested type, such as llama, qwen3 or gemma3_text (docs/models.md lists them)"
)


def no_chunks(model_type: str) -> str:
    """Return why what needs the KV of chunks cannot be done with a type of `WHOLE`."""
    return (
        f"model type {shown(model_type)} has no KV of chunks: {WHOLE[model_type]}. Answers from an "
        "index, which computes its prompts as wholes and keeps their beginnings, are what it gives"
    )


def refuse_config(config: Any) -> None:
    """Raise UnsupportedModelError for a model whose configuration alone says that it cannot be."""
    model_type = config.model_type
    if model_type in WHOLE:
        return
    kinds = set(getattr(config, "layer_types", None) or ()) - _ATTENTION
    if model_type in WHY_NOT or kinds:
        why = f"{_STATES}; {_TAKE}" if kinds & _KEEP_STATES else _OTHER_RULE
        raise UnsupportedModelError(
            f"model type {shown(model_type)} is not supported: "
            + WHY_NOT.get(model_type, f"{why} ({', '.join(map(shown, sorted(kinds)))})")
        )
    if model_type == "mpt" and not config.attn_config.alibi:
        raise UnsupportedModelError("an MPT model without ALiBi has no positions to serve")
    if any("dynamic" in str(one.get("rope_type")) for one in _ropes(config)):
        raise UnsupportedModelError(
            f"{shown(model_type)} with RoPE scaling 'dynamic' changes its frequencies with the "
            "total length, so KV cannot be stored position-free; supported: default, linear, "
            "llama3, yarn, and longrope up to the length that the model was first trained with"
        )
    if getattr(config, "use_bidirectional_attention", False):
        raise UnsupportedModelError(
            f"{shown(model_type)} with use_bidirectional_attention has no causal KV to reuse"
        )


def _first(module: nn.Module, names: tuple[str, ...]) -> str | None:
    """Return the first name that a module has something under."""
    return next((name for name in names if getattr(module, name, None) is not None), None)


def has_alibi(config: Any) -> bool:
    """Return whether a model encodes positions as a bias of its attention."""
    if config.model_type == "mpt":
        return bool(config.attn_config.alibi)
    return config.model_type == "bloom" or bool(getattr(config, "alibi", False))


def num_kv_heads(config: Any) -> int:
    """Return H, the number of key heads in a model's cache."""
    if config.model_type == "falcon":
        # With the new architecture its layers cache every key head once for each query head.
        is_shared = config.multi_query and not config.new_decoder_architecture
        return 1 if is_shared else int(config.num_attention_heads)
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def latent_of(config: Any) -> Latent | None:
    """Return how layers of multi-head latent attention keep tokens; None for other layers."""
    size, rotated = (getattr(config, name, None) for name in ("kv_lora_rank", "qk_rope_head_dim"))
    return Latent(size, rotated) if size and rotated else None


_BLOOM_WINDOW = 2048
"""BLOOM's trained length; its configurations give it as ``seq_length`` or not at all."""


def context_window(config: Any) -> int:
    """Return the number of positions that a model supports."""
    if config.model_type == "mpt":
        return int(config.max_seq_len)
    if config.model_type == "bloom":
        return int(getattr(config, "seq_length", _BLOOM_WINDOW))
    length = int(config.max_position_embeddings)
    length = min(length, _short_length(config) or length)
    if getattr(config, "attn_temperature_tuning", False):
        # Later rows are weighed by where they are in what a layer is given, not by their positions.
        length = min(length, int(config.floor_scale) - 1)
    return length


def _ropes(config: Any) -> list[dict[str, Any]]:
    """Return the parameters of rotary positions, for each type of layers."""
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    return [rope, *(one for one in rope.values() if isinstance(one, dict))]


def _short_length(config: Any) -> int | None:
    """Return the length up to which longrope has one set of frequencies; None without longrope."""
    found = [one for one in _ropes(config) if one.get("rope_type") == "longrope"]
    if not found:
        return None
    own = getattr(config, "original_max_position_embeddings", None)
    lengths: list[Any] = [one.get("original_max_position_embeddings") or own for one in found]
    if None in lengths:
        raise UnsupportedModelError(
            f"{shown(config.model_type)} has longrope, but its config.json does not say up to "
            "which length the short frequencies count (original_max_position_embeddings); restore "
            "it"
        )
    return int(min(lengths))


def sliding_windows(model: Model) -> list[int | None]:
    """Return each layer's attention window in tokens, None if it sees everything."""
    if isinstance(model, Decoder):
        return model.windows
    config = model.config
    if not find_family(model).windowed:
        return [None] * config.num_hidden_layers
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if window is not None and window < 1:
        raise UnsupportedModelError(
            f"{shown(config.model_type)} with a sliding_window of {window} in its config.json, "
            "expected at least 1; restore it"
        )
    if layer_types is None:
        return [window] * config.num_hidden_layers
    chunk = getattr(config, "attention_chunk_size", None)
    kinds = {"sliding_attention": window, "chunked_attention": chunk and Chunked(chunk)}
    return [kinds.get(kind) for kind in layer_types]


def project_logits(model: Model, hidden: torch.Tensor) -> torch.Tensor:
    """Return logits ``[..., vocabulary]`` of normed hidden states, as the model's forward does."""
    head: nn.Module = model.get_output_embeddings()
    logits: torch.Tensor = head(hidden)
    divisor: float | None = getattr(model.config, "logits_scaling", None)
    factor: float | None = getattr(model, "logit_scale", None)
    if divisor is not None:
        return logits / divisor
    if factor is not None:
        return logits * factor
    cap = getattr(model.config, "final_logit_softcapping", None)
    return logits if cap is None else torch.tanh(logits / cap) * cap
