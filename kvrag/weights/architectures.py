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
    "mistral3": "mistral",
    "qwen2": "qwen2",
    "qwen2vl": "qwen2",
    "qwen3": "qwen3",
    "qwen3vl": "qwen3",
    "qwen3moe": "qwen3_moe",
    "qwen3vlmoe": "qwen3_moe",
    "gpt-oss": "gpt_oss",
    "phi2": "phi",
    "phi3": "phi3",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "granite": "granite",
    "smollm3": "smollm3",
    "olmo2": "olmo2",
    "cohere2": "cohere2",
    "glm4": "glm4",
    "exaone4": "exaone4",
    "seed_oss": "seed_oss",
    "starcoder2": "starcoder2",
    "stablelm": "stablelm",
    "nemotron": "nemotron",
}
"""GGUF architectures that are read, and the type of model that each is."""

IN_PAIRS = ("llama", "mistral3", "granite", "smollm3")
"""Architectures whose files have the two numbers that are rotated together side by side."""
ADD_ONE = ("gemma", "gemma2", "gemma3", "nemotron")
"""Architectures whose files have 1 added to the weights of norms."""
SPARE = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that the configuration has taken; `attn_rot_embd` of old files repeats it."""
SEEING = ("v.", "mm.")
"""How the names of tensors begin that only images need."""

_INSTEAD = "take the model's folder of safetensors instead"
# Files of one architecture may hold a model of another type, if they say this.
_OTHER_TYPES = {
    "llama": ("expert_count", "mixtral"),
    "mistral3": ("attention.temperature_scale", "ministral3"),
    "olmo2": ("attention.sliding_window", "olmo3"),
}
_EPSILONS = {
    **{"starcoder2": "norm_epsilon", "stablelm": "layer_norm_eps", "nemotron": "norm_eps"},
    **{"phi": "layer_norm_eps", "cohere2": "layer_norm_eps"},
}
_PARTIAL = ("phi2", "phi3", "stablelm", "nemotron", "glm4")
_EXPERTS = {"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
# What single types of models have beside, and where files say it.
_FIELDS = {
    "mixtral": _EXPERTS,
    "gpt_oss": {**_EXPERTS, "intermediate_size": "expert_feed_forward_length"},
    "qwen3_moe": {
        "num_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "moe_intermediate_size": "expert_feed_forward_length",
    },
    "granite": {
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    },
    "cohere2": {"logit_scale": "logit_scale"},
}
# Biases that some models of a type have, and others have not.
_BIASES = {
    "attention_bias": "attn_q",
    "attention_out_bias": "attn_output",
    "mlp_bias": "ffn_up",
    "use_qkv_bias": "attn_q",
}
_WINDOWED = ("phi3", "starcoder2", "mistral", "ministral3", "mixtral")
# All but one of this many layers have a window, where a file does not say which.
_PATTERNS = {"gemma2": 2, "gpt_oss": 2, "cohere2": 4, "exaone4": 4, "olmo3": 4, "gemma3_text": 6}
# Fields that change no number of text begin so.
_HARMLESS = (
    *("vocab_size", "tensor_data_layout", "rope.scaling.finetuned"),
    *("vision.", "mm.", "n_deepstack_layers"),
)
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
        self._asked: set[str] = set()
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
        self._asked.add(name)
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

    def check_all_read(self) -> None:
        """Refuse a file that says something of its model that nothing has asked for."""
        begin = f"{self.architecture}."
        for name, field in self._fields.items():
            rest = name.removeprefix(begin)
            is_known = (
                name in self._asked or rest in _HARMLESS or rest.startswith(("vision.", "mm."))
            )
            if name.startswith(begin) and not is_known and field.contents():
                raise self.refusal(f"says {name}, which kvrag does not read")

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

    own, tensors, architecture = known.own, known.tensors, known.architecture
    kind = ARCHITECTURES[architecture]
    told, other = _OTHER_TYPES.get(architecture, ("", ""))
    if told and own(told, 0):
        kind = other
    made = CONFIG_MAPPING[kind]
    if "token_embd.weight" not in tensors:
        raise known.refusal("lacks token_embd.weight")
    hidden, heads = own("embedding_length"), own("attention.head_count")
    kv_heads = own("attention.head_count_kv", heads)
    if min(own("context_length"), hidden, heads, kv_heads) < 1 or heads % kv_heads:
        raise known.refusal(
            f"says {own('context_length')} positions, {hidden} numbers a row, {heads} heads and "
            f"{kv_heads} of keys: expected at least 1 of all, and as many heads for each of keys"
        )
    if not own("attention.causal", True):
        raise known.refusal("reads in both directions (attention.causal is false)")
    is_gemma3 = kind == "gemma3_text"
    width = own("attention.key_length", 256 if is_gemma3 else None)
    if width is None:
        width = own("rope.dimension_count", 0) if architecture in IN_PAIRS else hidden // heads
    width = width or hidden // heads
    if (other := own("attention.value_length", width)) != width:
        raise known.refusal(f"has keys of {width} numbers and values of {other}")
    if (layers := own("block_count")) > len(tensors):
        raise known.refusal(f"says {layers:,} layers, and has {len(tensors):,} tensors")
    fields = {
        "max_position_embeddings": own("context_length"),
        "num_hidden_layers": layers,
        "intermediate_size": own("feed_forward_length", 0),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": len(tensors["token_embd.weight"].data),
        "tie_word_embeddings": "output.weight" not in tensors,
        "rope_parameters": _rope(known, kind, width),
    }
    # Where the type has no field for it, one more would change the fingerprint of the model.
    if width != hidden // heads or hasattr(made, "head_dim"):
        fields["head_dim"] = width
    is_norm = kind in _EPSILONS
    usual = (1e-6,) if is_gemma3 else ()  # Ollama's files leave it out
    epsilon = own(f"attention.layer_norm_{'' if is_norm else 'rms_'}epsilon", *usual)
    fields[_EPSILONS.get(kind, "rms_norm_eps")] = epsilon
    for name in ("bos", "eos", "unknown", "padding"):
        key = {"unknown": "unk", "padding": "pad"}.get(name, name)
        fields[f"{key}_token_id"] = known.field(f"tokenizer.ggml.{name}_token_id", None)
    for name, place in _BIASES.items():
        if hasattr(made, name):
            fields[name] = f"blk.0.{place}.bias" in tensors
    fields |= {name: own(key) for name, key in _FIELDS.get(kind, {}).items()}
    fields |= _special(known, kind, fields)
    known.check_all_read()
    return made(**fields)


def _special(known: Metadata, kind: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return what single types of models have beside."""
    own, tensors, layers = known.own, known.tensors, fields["num_hidden_layers"]
    found: dict[str, Any] = {}
    window = own("attention.sliding_window", None) or (4096 if "gemma" in kind else None)
    if kind in _WINDOWED or kind in _PATTERNS:
        found["sliding_window"] = window
    if kind in _PATTERNS:
        key = f"{known.architecture}.attention.sliding_window_pattern"
        pattern = known.field(key, _PATTERNS[kind])
        if isinstance(pattern, int):
            pattern = [not pattern or (layer + 1) % pattern > 0 for layer in range(layers)]
        if len(pattern) != layers:
            raise known.refusal(f"says {key} for {len(pattern)} of {layers} layers")
        names = {True: "sliding_attention", False: "full_attention"}
        found["layer_types"] = [names[bool(one and window)] for one in pattern]
    if kind in ("gemma2", "gemma3_text"):
        is_by_width = layers == _BY_WIDTH[known.architecture]
        heads = fields["num_attention_heads"]
        scalar = fields["hidden_size"] // heads if is_by_width else fields["head_dim"]
        found["query_pre_attn_scalar"] = scalar
    if kind == "gemma2":
        found["attn_logit_softcapping"] = own("attn_logit_softcapping", 50.0)
        found["final_logit_softcapping"] = own("final_logit_softcapping", 30.0)
    elif kind == "qwen3_moe":
        found["norm_topk_prob"] = True
    elif kind == "stablelm":
        own("use_parallel_residual", None)  # as the tensors say
        found["use_parallel_residual"] = "blk.0.ffn_norm.weight" not in tensors
        found["qk_layernorm"] = "blk.0.attn_q_norm.weight" in tensors
    return found


def _rope(known: Metadata, kind: str, width: int) -> dict[str, Any]:
    """Return the parameters of rotary positions."""
    own = known.own
    is_gemma3 = kind == "gemma3_text"
    # The second name is Ollama's, whose files say nothing of the factor.
    base = own("rope.freq_base", own("rope.global.freq_base", 1e6 if is_gemma3 else 10_000.0))
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": base}
    rotated = own("rope.dimension_count", width)
    if known.architecture in _PARTIAL:
        rope["partial_rotary_factor"] = rotated / width
    elif rotated != width:
        raise known.refusal(f"rotates {rotated} of a head's {width} numbers")
    sections = known.field(f"{known.architecture}.rope.dimension_sections", None)
    if sections and known.architecture == "glm4":
        raise known.refusal("has positions of images (rope.dimension_sections)")
    scaling = "rope.scaling."
    scaled = own(f"{scaling}type", None)
    factor = own(f"{scaling}factor", own("rope.scale_linear", None))
    is_told = scaled is not None or factor is not None
    if is_gemma3 and not is_told and own("context_length") >= _LONG_GEMMA3:
        factor = 8.0
    scaled, factor = scaled or "linear", factor or 1.0
    original = own(f"{scaling}original_context_length", None) or own("context_length")
    strength = own(f"{scaling}attn_factor", 1.0)
    if not factor > 0:
        raise known.refusal(f"scales RoPE by {factor:g}: expected more than 0")
    whole, share = (own(f"{scaling}yarn_{name}", 0) for name in ("attn_factor", "log_multiplier"))
    if own(f"{scaling}yarn_ext_factor", 1.0) != 1.0:
        raise known.refusal("extrapolates yarn by another factor than 1 (yarn_ext_factor)")
    betas = {
        name: own(f"{scaling}yarn_{name}", own(f"{scaling}{name}", None))
        for name in ("beta_fast", "beta_slow")
    }
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
    elif scaled == "yarn" and (factor, strength) != (1.0, 1.0):
        rope |= {"rope_type": "yarn", "factor": factor}
        rope["original_max_position_embeddings"] = original
        grown = 0.1 * math.log(factor)
        if strength != 1.0 or whole or share:
            rope["attention_factor"] = whole or strength * (1 + grown) / (1 + share * grown)
        rope |= {name: beta for name, beta in betas.items() if beta is not None}
        if kind == "gpt_oss":
            rope["truncate"] = False  # as in the only models of it
    elif scaled == "linear" and factor != 1.0:
        rope |= {"rope_type": "linear", "factor": factor}
    elif scaled not in ("none", "linear", "yarn"):
        raise known.refusal(f"scales RoPE by {shown(scaled)}, which kvrag does not read")
    if strength != 1.0 and rope["rope_type"] not in ("longrope", "yarn"):
        raise known.refusal(f"multiplies attention by {strength:g} without yarn or longrope")
    if kind == "ministral3":
        rope["llama_4_scaling_beta"] = own("attention.temperature_scale")
    if kind not in ("gemma3_text", "olmo3"):
        return rope
    usual = 10_000.0 if is_gemma3 else base
    local = own("rope.freq_base_swa", own("rope.local.freq_base", usual))
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
