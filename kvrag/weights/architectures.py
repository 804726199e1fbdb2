"""What a GGUF file says of its model, as a configuration of Transformers.

Transformers reads sizes and leaves out what else the numbers depend on: scaled frequencies, heads
of another width, partial rotation, windows, soft caps, biases. All of it is read here, and a file
that says more than that is refused. `tests/weights/test_architectures.py` has each architecture.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvrag.arguments import shown
from kvrag.errors import ModelLoadError

ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "phi3": "phi3",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "starcoder2": "starcoder2",
    "stablelm": "stablelm",
    "nemotron": "nemotron",
}
"""GGUF architectures that are read, and the type of model that each is."""

SPARE = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that the configuration has taken; `attn_rot_embd` of old files repeats it."""

_INSTEAD = "take the model's folder of safetensors instead"
_EPSILONS = {"starcoder2": "norm_epsilon", "stablelm": "layer_norm_eps", "nemotron": "norm_eps"}
_PARTIAL = ("phi3", "stablelm", "nemotron")
# Files hold the factors that follow from them, not these.
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# Layers of the models whose queries are scaled by the width of a head that they do not have: as
# llama.cpp knows them.
_BY_WIDTH = {"gemma2": 46, "gemma3": 62}
_FACTOR_TOLERANCE = 1e-3
# Positions of those models of Gemma 3 whose frequencies are scaled, by 8.
_LONG_GEMMA3 = 131_072


class Metadata:
    """What a GGUF file says of its model.

    Parameters
    ----------
    path
        The file.
    reader
        A ``gguf.GGUFReader`` of it.

    Raises
    ------
    ModelLoadError
        When its architecture is not read.
    """

    def __init__(self, path: Path, reader: Any) -> None:
        self.path, self._fields = path, reader.fields
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.architecture = str(self.field("general.architecture", ""))
        if self.architecture not in ARCHITECTURES:
            raise ModelLoadError(
                f"{path} has a model of architecture {shown(self.architecture)}: as GGUF, kvrag "
                f"reads {', '.join(ARCHITECTURES)}; {_INSTEAD}"
            )
        for name in ("tokens", "model"):
            if f"tokenizer.ggml.{name}" not in reader.fields:
                raise ModelLoadError(
                    f"{path} has no tokenizer (tokenizer.ggml.{name}); take a file with one, or "
                    "the model's folder of safetensors"
                )

    def field(self, name: str, *otherwise: Any) -> Any:
        """Return a field's value; refuse the file if it is not there and nothing is given."""
        found = self._fields.get(name)
        if found is None and not otherwise:
            raise self.refusal(f"does not say {name}")
        return otherwise[0] if found is None else found.contents()

    def own(self, name: str, *otherwise: Any) -> Any:
        """Return the value of a field whose name begins with the architecture's."""
        found = self.field(f"{self.architecture}.{name}", *otherwise)
        if isinstance(found, list):
            raise self.refusal(
                f"says {self.architecture}.{name} for each layer, but kvrag reads models whose "
                "layers have one"
            )
        return found

    def refusal(self, why: str) -> ModelLoadError:
        """Return the error that says why a file is not read."""
        return ModelLoadError(f"{self.path} {why}; {_INSTEAD}")


def read_config(known: Metadata) -> Any:
    """Return the configuration of a GGUF file's model.

    Raises
    ------
    ModelLoadError
        When the file says too little, or something that no configuration says.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    own, kind = known.own, ARCHITECTURES[known.architecture]
    if known.architecture == "llama" and own("expert_count", 0):
        raise known.refusal("is a mixture of experts under the name of llama (Mixtral)")
    if "token_embd.weight" not in known.tensors:
        raise known.refusal("lacks token_embd.weight")
    hidden, heads = own("embedding_length"), own("attention.head_count")
    if not own("attention.causal", True):
        raise known.refusal("reads in both directions (attention.causal is false)")
    is_gemma3 = kind == "gemma3_text"
    width = own("attention.key_length", 256 if is_gemma3 else None)
    if width is None:
        width = own("rope.dimension_count", 0) if kind == "llama" else hidden // heads
    width = width or hidden // heads
    if (other := own("attention.value_length", width)) != width:
        raise known.refusal(f"has keys of {width} numbers and values of {other}")
    if (layers := own("block_count")) > len(known.tensors):
        raise known.refusal(f"says {layers:,} layers, and has {len(known.tensors):,} tensors")
    fields = {
        "max_position_embeddings": own("context_length"),
        "num_hidden_layers": layers,
        "intermediate_size": own("feed_forward_length", 0),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": own("attention.head_count_kv", heads),
        "vocab_size": len(known.tensors["token_embd.weight"].data),
        "tie_word_embeddings": "output.weight" not in known.tensors,
        "rope_parameters": _rope(known, width),
    }
    # Where the type has no field for it, one more would change the fingerprint of the model.
    if width != hidden // heads or hasattr(CONFIG_MAPPING[kind], "head_dim"):
        fields["head_dim"] = width
    is_norm = kind in _EPSILONS
    usual = (1e-6,) if is_gemma3 else ()  # Ollama's files leave it out
    epsilon = own(f"attention.layer_norm_{'' if is_norm else 'rms_'}epsilon", *usual)
    fields[_EPSILONS.get(kind, "rms_norm_eps")] = epsilon
    for name in ("bos", "eos", "unknown", "padding"):
        key = {"unknown": "unk", "padding": "pad"}.get(name, name)
        fields[f"{key}_token_id"] = known.field(f"tokenizer.ggml.{name}_token_id", None)
    return CONFIG_MAPPING[kind](**fields, **_special(known, kind, fields))


def _special(known: Metadata, kind: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return what single types of models have beside."""
    own, tensors = known.own, known.tensors
    window = own("attention.sliding_window", None) or None
    if kind == "llama":
        return {
            "attention_bias": "blk.0.attn_q.bias" in tensors,
            "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        }
    if kind == "qwen3":
        return {"attention_bias": "blk.0.attn_q.bias" in tensors}
    if kind == "qwen3_moe":
        return {
            "num_experts": own("expert_count"),
            "num_experts_per_tok": own("expert_used_count"),
            "moe_intermediate_size": own("expert_feed_forward_length"),
            "norm_topk_prob": True,
        }
    if kind == "phi3":
        return {"sliding_window": window}
    if kind.startswith("gemma"):
        layers, heads = fields["num_hidden_layers"], fields["num_attention_heads"]
        by_width = layers == _BY_WIDTH[known.architecture]
        pattern = known.field("gemma3.attention.sliding_window_pattern", 6)
        if pattern not in (6, [bool((layer + 1) % 6) for layer in range(layers)]):
            raise known.refusal("has its windows in other layers than each but the sixth")
        found = {
            "sliding_window": window or 4096,
            "query_pre_attn_scalar": fields["hidden_size"] // heads
            if by_width
            else fields["head_dim"],
        }
        if kind == "gemma2":
            found["attn_logit_softcapping"] = own("attn_logit_softcapping", 50.0)
            found["final_logit_softcapping"] = own("final_logit_softcapping", 30.0)
        return found
    if kind == "stablelm":
        return {
            "use_qkv_bias": "blk.0.attn_q.bias" in tensors,
            "use_parallel_residual": "blk.0.ffn_norm.weight" not in tensors,
            "qk_layernorm": "blk.0.attn_q_norm.weight" in tensors,
        }
    return {"sliding_window": window} if kind == "starcoder2" else {}


def _rope(known: Metadata, width: int) -> dict[str, Any]:
    """Return the parameters of rotary positions."""
    own = known.own
    is_gemma3 = known.architecture == "gemma3"
    # The second name is Ollama's, whose files say nothing of the factor.
    base = own("rope.freq_base", own("rope.global.freq_base", 1e6 if is_gemma3 else 10_000.0))
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": base}
    rotated = own("rope.dimension_count", width)
    if known.architecture in _PARTIAL:
        rope["partial_rotary_factor"] = rotated / width
    elif rotated != width:
        raise known.refusal(f"rotates {rotated} of a head's {width} numbers")
    kind = own("rope.scaling.type", None)
    factor = own("rope.scaling.factor", own("rope.scale_linear", None))
    is_told = kind is not None or factor is not None
    if is_gemma3 and not is_told and own("context_length") >= _LONG_GEMMA3:
        factor = 8.0
    kind, factor = kind or "linear", factor or 1.0
    original = own("rope.scaling.original_context_length", None) or own("context_length")
    strength = own("rope.scaling.attn_factor", own("rope.scaling.yarn_attn_factor", 1.0))
    if SPARE[1] in known.tensors:
        # Which of the two counts depends on the length; the shorter is served.
        rope |= {
            "rope_type": "longrope",
            "long_factor": _factors(known, SPARE[1]),
            "short_factor": _factors(known, SPARE[2]),
            "original_max_position_embeddings": original,
            "attention_factor": strength,
        }
    elif SPARE[0] in known.tensors:
        rope |= _as_llama3(known, rope["rope_theta"], rotated)
    elif kind == "yarn" and (factor, strength) != (1.0, 1.0):
        rope |= {"rope_type": "yarn", "factor": factor}
        rope["original_max_position_embeddings"] = original
        if strength != 1.0:
            rope["attention_factor"] = strength * (1 + 0.1 * math.log(factor))
        for name in ("beta_fast", "beta_slow"):
            beta = own(f"rope.scaling.yarn_{name}", own(f"rope.scaling.{name}", None))
            if beta is not None:
                rope[name] = beta
    elif kind == "linear" and factor != 1.0:
        rope |= {"rope_type": "linear", "factor": factor}
    elif kind not in ("none", "linear", "yarn"):
        raise known.refusal(f"scales RoPE by {shown(kind)}, which kvrag does not read")
    if strength != 1.0 and rope["rope_type"] not in ("longrope", "yarn"):
        raise known.refusal(f"multiplies attention by {strength:g} without yarn or longrope")
    if not is_gemma3:
        return rope
    local = own("rope.freq_base_swa", own("rope.local.freq_base", 10_000.0))
    return {
        "full_attention": rope,
        "sliding_attention": {"rope_type": "default", "rope_theta": local},
    }


def _factors(known: Metadata, name: str) -> list[float]:
    found: Sequence[float] = known.tensors[name].data.reshape(-1).tolist()
    return list(found)


def _as_llama3(known: Metadata, theta: float, rotated: int) -> dict[str, Any]:
    """Return Llama 3's scaling, if the file's factors of frequencies are those of it."""
    found = _factors(known, SPARE[0])
    most = max(found)
    low, high, original = _LLAMA3.values()
    for index, factor in enumerate(found):
        turns = original / (2 * math.pi * theta ** (2 * index / rotated))
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        expected = 1 / ((1 - smooth) / most + smooth)
        if abs(factor - expected) > _FACTOR_TOLERANCE * expected:
            raise known.refusal(
                f"scales RoPE by {SPARE[0]}, whose factor {index} is {factor:.4g}: expected "
                f"{expected:.4g}, as Llama 3.1 and 3.2 have it"
            )
    return {"rope_type": "llama3", "factor": most, **_LLAMA3}
