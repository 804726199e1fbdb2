"""Small random models of every family, and a tokenizer trained on the spot."""

import functools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from kvrag.weights.cache import converted
from kvrag.weights.named import named_model
from kvrag.weights.sources import find_gguf

VOCAB_SIZE = 384

_TEXT = [
    "The quick brown fox jumps over the lazy dog near the old river bank.",
    "Question: who wrote the book? Answer: the keeper of the northern light.",
    "Use the following pieces of context to answer the question at the end.",
    "Context information is below.\n---------------------\n",
    "Ines keeps the harbour ledger, and Tomas repairs the tall clock of Varn.",
]

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>\n"
    "{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
HEAD = "<|user|>\n"
"""What the template puts before a user's text, after <bos>: chunks after it are exact."""


@functools.cache
def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer of 384 entries that puts <bos> first, like Llama's."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        _TEXT,
        trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE,
            special_tokens=["<bos>", "<eos>", "<pad>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "tie_word_embeddings": False,
}

ENDS: dict[str, Any] = {name: SMALL[name] for name in SMALL if name.endswith("token_id")}


def _config(name: str, base: Mapping[str, Any] | None = None, **more: Any) -> PreTrainedConfig:
    return getattr(transformers, f"{name}Config")(**{**(SMALL if base is None else base), **more})


def _rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


_MHA = {name: value for name, value in SMALL.items() if name != "num_key_value_heads"}
_FALCON = {name: SMALL[name] for name in SMALL if not name.startswith(("inter", "tie", "num_key"))}
_FALCON["alibi"] = False
_SHORT: dict[str, Any] = {"vocab_size": VOCAB_SIZE, **ENDS}
_TYPES = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
_WINDOWS: dict[str, Any] = {"sliding_window": 24, "layer_types": _TYPES}
_GEMMA: dict[str, Any] = {"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 16}
_FAR = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
_FEW_EXPERTS: dict[str, Any] = {
    **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}
_LATENT: dict[str, Any] = {
    **{"num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 21, "qk_rope_head_dim": 8},
    **{"qk_nope_head_dim": 16, "v_head_dim": 12, "moe_intermediate_size": 32, "n_group": 1},
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "topk_group": 1},
}
_MIXED = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
_LINEAR: dict[str, Any] = {
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16},
    **{"linear_value_head_dim": 16, "layer_types": _MIXED},
}
_SHARED: dict[str, Any] = {
    **{"vocab_size_per_layer_input": VOCAB_SIZE, "hidden_size_per_layer_input": 16},
    **{"num_kv_shared_layers": 2, "sliding_window": 24, "head_dim": 16},
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
_CONV: dict[str, Any] = {"layer_types": ["conv", "full_attention"] * 2}
_MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_state": 16, "mamba_d_head": 16}

Families = dict[str, Callable[[], PreTrainedConfig]]
# Only a test of the context window sets max_position_embeddings below 2048.
FAMILIES: Families = {
    "llama": partial(_config, "Llama"),
    "llama-llama3": partial(
        _config, "Llama", **_rope("llama3", original_max_position_embeddings=64, **_FAR)
    ),
    "llama-yarn": partial(
        _config, "Llama", **_rope("yarn", factor=8.0, original_max_position_embeddings=256)
    ),
    "mistral-sliding": partial(_config, "Mistral", sliding_window=24),
    "qwen2": partial(_config, "Qwen2"),
    "qwen3": partial(_config, "Qwen3", head_dim=32),
    "phi3": partial(_config, "Phi3"),
    "gemma2": partial(_config, "Gemma2", **_GEMMA),
    "gemma3": partial(_config, "Gemma3Text", **_GEMMA, layer_types=_TYPES),
    "gpt-neox": partial(_config, "GPTNeoX", _MHA, rotary_pct=0.25),
}

OTHER_POSITIONS: Families = {
    "bloom": partial(
        _config, "Bloom", _SHORT, hidden_size=64, n_layer=4, n_head=4, seq_length=2048
    ),
    "mpt": partial(_config, "Mpt", _SHORT, d_model=64, n_layers=4, n_heads=4, max_seq_len=2048),
    "falcon-rope": partial(_config, "Falcon", _FALCON, multi_query=True),
    "falcon-new": partial(
        _config, "Falcon", _FALCON, new_decoder_architecture=True, num_kv_heads=2
    ),
    "falcon-alibi": partial(
        _config, "Falcon", _FALCON, alibi=True, multi_query=False, parallel_attn=False
    ),
}
"""Families whose KV is valid at any position, though not all use RoPE."""

LEARNED_POSITIONS: Families = {
    "gpt2": partial(_config, "GPT2", _SHORT, n_embd=64, n_layer=4, n_head=4, n_positions=2048),
}

MORE_FAMILIES: Families = {
    "qwen3-moe": partial(_config, "Qwen3Moe", **_FEW_EXPERTS, head_dim=16, norm_topk_prob=True),
    "mixtral": partial(_config, "Mixtral", **_EXPERTS),
    "gpt-oss": partial(
        _config,
        "GptOss",
        **{**_EXPERTS, **_WINDOWS, "head_dim": 16},
        **_rope("yarn", factor=4.0, original_max_position_embeddings=512),
    ),
    "granite": partial(
        _config,
        "Granite",
        **{"embedding_multiplier": 3.0, "residual_multiplier": 0.22},
        **{"attention_multiplier": 0.25, "logits_scaling": 8.0},
    ),
    "smollm3": partial(_config, "SmolLM3", no_rope_layers=[1, 1, 1, 0]),
    "olmo2": partial(_config, "Olmo2"),
    "olmo3": partial(_config, "Olmo3", **_WINDOWS),
    "ministral3": partial(
        _config,
        "Ministral3",
        head_dim=16,
        **_rope("yarn", factor=16.0, original_max_position_embeddings=64, llama_4_scaling_beta=0.1),
    ),
    "gemma": partial(_config, "Gemma", head_dim=16),
    "phi3-longrope": partial(
        _config,
        "Phi3",
        original_max_position_embeddings=512,
        **_rope(
            "longrope",
            partial_rotary_factor=0.75,
            long_factor=[1.0 + 0.5 * i for i in range(6)],
            short_factor=[1.0 + 0.1 * i for i in range(6)],
            original_max_position_embeddings=512,
        ),
    ),
    "cohere2": partial(_config, "Cohere2", **_WINDOWS, logit_scale=0.25),
    "glm4": partial(_config, "Glm4", head_dim=16, partial_rotary_factor=0.5),
    "exaone4": partial(_config, "Exaone4", **_WINDOWS),
    "seed-oss": partial(_config, "SeedOss", head_dim=16),
    "starcoder2": partial(_config, "Starcoder2", sliding_window=24),
    "stablelm": partial(_config, "StableLm"),
    "phi": partial(_config, "Phi"),
    "llama4": partial(
        _config,
        "Llama4Text",
        **{"head_dim": 16, "intermediate_size_mlp": 96, "num_local_experts": 2},
        **{"attention_chunk_size": 24, "interleave_moe_layer_step": 2},
    ),
    "deepseek-v3": partial(_config, "DeepseekV3", **_LATENT, first_k_dense_replace=1),
    "nemotron": partial(_config, "Nemotron"),
}
"""Families that no other test needs: `tests/models/test_families.py` takes them."""

WHOLE_FAMILIES: Families = {
    "qwen3_next": partial(
        _config,
        "Qwen3Next",
        **{**_LINEAR, **_FEW_EXPERTS, "head_dim": 16, "shared_expert_intermediate_size": 32},
    ),
    "qwen3_5_text": partial(_config, "Qwen3_5Text", **_LINEAR, head_dim=16),
    "qwen3_5_moe_text": partial(
        _config,
        "Qwen3_5MoeText",
        **{**_LINEAR, **_FEW_EXPERTS, "head_dim": 16, "shared_expert_intermediate_size": 32},
    ),
    "granitemoehybrid": partial(
        _config,
        "GraniteMoeHybrid",
        **{"layer_types": ["mamba", "attention"] * 2, "num_local_experts": 0},
        **{"shared_intermediate_size": 64, "mamba_expand": 2, **_MAMBA},
    ),
    "lfm2": partial(_config, "Lfm2", **_CONV),
    "lfm2_moe": partial(_config, "Lfm2Moe", **_CONV, **_FEW_EXPERTS, num_dense_layers=1),
    "falcon_h1": partial(_config, "FalconH1", **{**_MAMBA, "mamba_d_ssm": 64, "mamba_n_heads": 4}),
    "zamba2": partial(
        _config,
        "Zamba2",
        **{"mamba_d_state": 16, "mamba_ngroups": 1, "n_mamba_heads": 8, "mamba_headdim": 16},
        **{"hybrid_layer_ids": [1, 3], "num_mem_blocks": 1},
        layers_block_type=["mamba", "hybrid"] * 2,
    ),
    "nemotron_h": partial(
        _config,
        "NemotronH",
        **{"hybrid_override_pattern": "M*M-", "mamba_num_heads": 8, "mamba_head_dim": 16},
        **{"ssm_state_size": 16, "n_groups": 1},
    ),
    "olmo_hybrid": partial(_config, "OlmoHybrid", **_LINEAR),
    "gemma3n_text": partial(
        _config,
        "Gemma3nText",
        **{**_SHARED, "laurel_rank": 8, "altup_num_inputs": 2},
        activation_sparsity_pattern=[0.0] * 4,
    ),
    "gemma4_text": partial(_config, "Gemma4Text", **_SHARED, global_head_dim=32),
}
"""Types whose prompts are computed as wholes (`kvrag.models.families.WHOLE`)."""

_ALL = FAMILIES | OTHER_POSITIONS | LEARNED_POSITIONS | MORE_FAMILIES | WHOLE_FAMILIES


def make_model(
    family: str = "llama", *, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any
) -> PreTrainedModel:
    """Return a small random model of a family."""
    config = _ALL[family]()
    for name, value in overrides.items():
        setattr(config, name, value)
    return spread(config, seed).to(dtype)


def spread(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """Return a model with random weights, spread wide so that attention is not uniform."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim >= 2:
                    parameter.normal_(0.0, 0.15)
                elif name.endswith("bias"):
                    parameter.normal_(0.0, 0.05)
    return model.eval()


def needs_named_model(name: str) -> pytest.MarkDecorator:
    """Return the mark that skips a test where a named model is neither installed nor converted."""
    model, source = named_model(name), find_gguf(name)
    is_there = bool(source.files or converted(source))
    return pytest.mark.skipif(not is_there, reason=f"needs {name}: {model.install_command}")
