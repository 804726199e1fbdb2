"""Models of each architecture that is read, written as GGUF as llama.cpp does, and read again."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvrag.errors import ModelLoadError
from kvrag.models.loading import model_fingerprint
from kvrag.models.pretrained import load_weights
from kvrag.models.references import resolve_model
from kvrag.models.small import small_layers
from kvrag.native import IS_COMPILED
from kvrag.weights import architectures
from kvrag.weights.architectures import ARCHITECTURES, Metadata, read_config
from kvrag.weights.packing import plan
from tests.support.gguf_files import write_gguf, write_model
from tests.support.models import SMALL


@pytest.fixture(autouse=True)
def _names_are_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map))


_EPS = {"rms_norm_eps": 1e-5}
_BASE = {**SMALL, "num_hidden_layers": 2, "intermediate_size": 128}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 512,
}
_SHORT, _LONG = ([1.0 + by * number for number in range(6)] for by in (0.1, 0.5))
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": _SHORT,
    "long_factor": _LONG,
    "attention_factor": 1.19,
    "original_max_position_embeddings": 512,
}
_SCALED_YARN = {
    "rope.freq_base": 1e6,
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 512,
}
_STRONG_YARN = {
    **_YARN,
    "original_max_position_embeddings": 2048,
    "attention_factor": 1.2 * (1 + 0.1 * math.log(4)),
}
_LOCAL = {"rope_type": "default", "rope_theta": 10_000.0}
_GLOBAL = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}


def _array(numbers: list[float]) -> np.ndarray:
    return np.array(numbers, np.float32)


def _llama3_factors(width: int) -> dict[str, np.ndarray]:
    config = transformers.LlamaConfig(**_BASE, head_dim=width, rope_parameters=_LLAMA3)
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    plain = _LLAMA3["rope_theta"] ** -(torch.arange(0, width, 2) / width)
    return {"rope_freqs.weight": (plain / rotary.inv_freq).numpy()}


_ROPE = {"rope.dimension_count": 16, "rope.freq_base": 10_000.0}
# By name: the architecture, the class of Transformers, what its configuration says beside sizes,
# what the file says, and tensors of it that are no weights.
_CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any], dict[str, np.ndarray]]] = {
    "llama": ("llama", "Llama", _EPS, _ROPE, {}),
    "llama-untied": ("llama", "Llama", {**_EPS, "tie_word_embeddings": False}, _ROPE, {}),
    "llama-biases": (
        "llama",
        "Llama",
        {**_EPS, "attention_bias": True, "mlp_bias": True},
        _ROPE,
        {},
    ),
    "llama-3.2": (
        "llama",
        "Llama",
        {**_EPS, "head_dim": 32, "max_position_embeddings": 131_072, "rope_parameters": _LLAMA3},
        {"rope.dimension_count": 32, "rope.freq_base": 500_000.0},
        _llama3_factors(32),
    ),
    "llama-linear": (
        "llama",
        "Llama",
        {**_EPS, "rope_parameters": {**_LOCAL, "rope_type": "linear", "factor": 4.0}},
        {**_ROPE, "rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
        {},
    ),
    "llama-none": (
        "llama",
        "Llama",
        _EPS,
        {**_ROPE, "rope.scaling.type": "none", "rope.scaling.factor": 4.0},
        {},
    ),
    "llama-linear-without-a-factor": (
        "llama",
        "Llama",
        _EPS,
        {**_ROPE, "rope.scaling.type": "linear", "rope.scaling.factor": 0.0},
        {},
    ),
    "mistral": (
        "llama",
        "Mistral",
        {**_EPS, "head_dim": 32, "sliding_window": None, "tie_word_embeddings": False},
        {"rope.dimension_count": 32, "attention.key_length": 32, "attention.value_length": 32},
        {},
    ),
    "qwen2": ("qwen2", "Qwen2", {**_EPS, "rope_parameters": _YARN}, _SCALED_YARN, {}),
    "qwen2-strong": (
        "qwen2",
        "Qwen2",
        {**_EPS, "rope_parameters": _STRONG_YARN},
        {
            **{"rope.freq_base": 1e6, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0},
            "rope.scaling.attn_factor": 1.2,
        },
        {},
    ),
    "qwen3": (
        "qwen3",
        "Qwen3",
        {**_EPS, "head_dim": 32, "rope_parameters": {**_LOCAL, "rope_theta": 1e6}},
        {"attention.key_length": 32, "attention.value_length": 32, "rope.freq_base": 1e6},
        {},
    ),
    "qwen3moe": (
        "qwen3moe",
        "Qwen3Moe",
        {
            **_EPS,
            **{"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2},
            **{"moe_intermediate_size": 32, "norm_topk_prob": True},
        },
        {
            **{"attention.key_length": 32, "attention.value_length": 32, "expert_count": 4},
            **{"expert_used_count": 2, "expert_feed_forward_length": 32},
        },
        {},
    ),
    "phi3": (
        "phi3",
        "Phi3",
        {**_EPS, "sliding_window": 64, "tie_word_embeddings": False},
        {**_ROPE, "attention.sliding_window": 64},
        {},
    ),
    "phi4-mini": (
        "phi3",
        "Phi3",
        {**_EPS, "rope_parameters": _LONGROPE, "original_max_position_embeddings": 512},
        {
            **{"rope.dimension_count": 12, "rope.scaling.original_context_length": 512},
            **{"rope.scaling.attn_factor": 1.19, "attention.sliding_window": 0},
        },
        {
            "rope_factors_long.weight": _array(_LONG),
            "rope_factors_short.weight": _array(_SHORT),
        },
    ),
    "gemma2": (
        "gemma2",
        "Gemma2",
        {**_EPS, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 64, **_CAPS},
        {"attention.key_length": 32, "attention.value_length": 32, **_CAPS}
        | {"attention.sliding_window": 64},
        {},
    ),
    "gemma3": (
        "gemma3",
        "Gemma3Text",
        {
            **_EPS,
            **{"num_hidden_layers": 6, "head_dim": 32, "query_pre_attn_scalar": 32},
            "sliding_window": 64,
            "rope_parameters": {"full_attention": _GLOBAL, "sliding_attention": _LOCAL},
        },
        {
            **{"attention.key_length": 32, "attention.value_length": 32, "rope.freq_base": 1e6},
            **{"attention.sliding_window": 64, "rope.scaling.type": "linear"},
            "rope.scaling.factor": 8.0,
        },
        {},
    ),
    "gemma3-1b-of-ollama": (
        "gemma3",
        "Gemma3Text",
        {
            **{"num_hidden_layers": 6, "head_dim": 32, "query_pre_attn_scalar": 32, **_EPS},
            "sliding_window": 64,
            "rope_parameters": {
                "full_attention": {**_LOCAL, "rope_theta": 2e6},
                "sliding_attention": {**_LOCAL, "rope_theta": 2e4},
            },
        },
        {
            **{"attention.key_length": 32, "attention.value_length": 32},
            **{"attention.sliding_window": 64, "attention.sliding_window_pattern": 6},
            **{"rope.global.freq_base": 2e6, "rope.local.freq_base": 2e4},
        },
        {},
    ),
    "gemma3-4b-of-ollama": (
        "gemma3",
        "Gemma3Text",
        {
            **{"num_hidden_layers": 6, "head_dim": 32, "query_pre_attn_scalar": 32},
            **{"sliding_window": 64, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-6},
            "rope_parameters": {"full_attention": _GLOBAL, "sliding_attention": _LOCAL},
        },
        {
            **{"attention.key_length": 32, "attention.value_length": 32},
            **{"attention.sliding_window": 64, "attention.layer_norm_rms_epsilon": None},
            "attention.sliding_window_pattern": [True] * 5 + [False],
        },
        {"v.patch_embedding.bias": _array([1.0]), "mm.mm_soft_emb_norm.weight": _array([1.0])},
    ),
    "starcoder2": (
        "starcoder2",
        "Starcoder2",
        {"norm_epsilon": 1e-5, "rope_parameters": {**_LOCAL, "rope_theta": 1e5}},
        {"rope.freq_base": 1e5},
        {},
    ),
    "stablelm": (
        "stablelm",
        "StableLm",
        {"use_qkv_bias": True, "rope_parameters": {**_LOCAL, "partial_rotary_factor": 0.25}},
        {"rope.dimension_count": 4},
        {},
    ),
    "nemotron": (
        "nemotron",
        "Nemotron",
        {"rope_parameters": {**_LOCAL, "partial_rotary_factor": 0.5}},
        {"rope.dimension_count": 8},
        {},
    ),
}


def made(name: str, path: Path, **more: Any) -> PreTrainedModel:
    """Write a case's file; return its model with the weights that the file has, in float32."""
    architecture, kind, settings, fields, tensors = _CASES[name]
    sizes = {**_BASE, "tie_word_embeddings": True, **settings, **more}
    torch.manual_seed(0)
    hf = AutoModelForCausalLM.from_config(getattr(transformers, f"{kind}Config")(**sizes))
    with torch.no_grad():
        for parameter in hf.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    kinds = {"kind": "Q4_K"} if sizes["hidden_size"] == 256 else {}
    write_model(path, hf, architecture, fields=fields, more=tensors, **kinds)
    return hf.eval()


def read(path: Path, folder: Path, *, is_small: bool = False) -> PreTrainedModel:
    folder.mkdir()
    planned = plan(Metadata(path, gguf.GGUFReader(str(path))), is_small=is_small)
    planned.save_pretrained(folder)
    return load_weights(folder, None, None)


@pytest.mark.parametrize("name", ["qwen2", "phi3", "starcoder2", "stablelm"])
def test_a_width_that_says_nothing_is_not_in_the_fingerprint(name: str, tmp_path: Path) -> None:
    """Indexes of earlier versions stay those of the model."""
    made(name, tmp_path / "m.gguf")
    found = read_config(Metadata(tmp_path / "m.gguf", gguf.GGUFReader(str(tmp_path / "m.gguf"))))
    assert "head_dim" not in found.to_dict()


@torch.no_grad()
def compare(found: PreTrainedModel, hf: PreTrainedModel) -> None:
    ids = torch.arange(3, 200)[None]
    expected = hf(ids).logits
    assert (found.float()(ids).logits - expected).norm() < 1e-5 * expected.norm()


def test_each_architecture_has_a_case() -> None:
    assert {case[0] for case in _CASES.values()} == set(ARCHITECTURES)


@pytest.mark.parametrize("name", _CASES)
def test_a_file_is_the_model_that_it_was_written_from(name: str, tmp_path: Path) -> None:
    hf = made(name, tmp_path / "m.gguf")
    compare(read(tmp_path / "m.gguf", tmp_path / "whole"), hf)


@pytest.mark.parametrize("name", ["llama-3.2", "qwen2", "qwen3", "gemma2", "gemma3"])
@pytest.mark.skipif(not IS_COMPILED, reason="kernels compute with them")
def test_mixtures_of_k_blocks_stay_in_their_bits(name: str, tmp_path: Path) -> None:
    """Q4_K with Q6_K, as in files that are called Q4_K_M."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8}
    hf = made(name, tmp_path / "m.gguf", **sizes)
    whole = read(tmp_path / "m.gguf", tmp_path / "whole")
    small = read(tmp_path / "m.gguf", tmp_path / "small", is_small=True)
    kinds = {one._kind[0] for one in small_layers(small).values()}
    assert kinds == {4, 6}
    assert model_fingerprint(small) == model_fingerprint(whole)
    compare(whole, hf)


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_the_largest_gemmas_scale_queries_by_the_models_width(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = _CASES[name][2].get("num_hidden_layers", 2)
    monkeypatch.setitem(architectures._BY_WIDTH, name, layers)
    hf = made(name, tmp_path / "m.gguf", query_pre_attn_scalar=16)
    compare(read(tmp_path / "m.gguf", tmp_path / "whole"), hf)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"architecture": "rwkv6"}, r"architecture 'rwkv6': as GGUF, kvrag reads llama, qwen2"),
        ({"has_tokenizer": False}, "has no tokenizer"),
        ({"fields": {"block_count": None}}, r"does not say llama\.block_count"),
        ({"fields": {"attention.head_count": [4, 2]}}, "for each layer"),
        ({"fields": {"expert_count": 8}}, "mixture of experts under the name of llama"),
        ({"fields": {"attention.value_length": 8}}, "keys of 16 numbers and values of 8"),
        ({"fields": {"rope.dimension_count": 8, "attention.key_length": 16}}, "rotates 8 of"),
        ({"fields": {"attention.causal": False}}, "reads in both directions"),
        (
            {
                "architecture": "gemma3",
                "fields": {"attention.key_length": 16, "attention.sliding_window_pattern": 4},
            },
            "windows in other layers",
        ),
        ({"fields": {"rope.scaling.type": "longrope"}}, "scales RoPE by 'longrope'"),
        ({"fields": {"rope.scaling.attn_factor": 1.2}}, r"multiplies attention by 1\.2"),
        (
            {"fields": {"feed_forward_length": 96}},
            r"ffn_gate.weight of shape \(128, 64\).*\(96, 64",
        ),
        (
            {"more": {"rope_freqs.weight": _array([1.0] * 7 + [3.0])}},
            r"factor 6 is 1: exp.* 2\.495",
        ),
        ({"more": {"blk.0.attn_q_norm.weight": _array([1.0] * 16)}}, "has no place"),
        ({"more": {"blk.1.ffn_down.weight": _array([])}}, "lacks 1 weights.*down_proj"),
    ],
)
def test_a_file_that_says_more_or_less_is_refused(
    tmp_path: Path, given: dict[str, Any], message: str
) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, **given)
    with pytest.raises(ModelLoadError, match=message) as caught:
        plan(Metadata(path, gguf.GGUFReader(str(path))), is_small=False)
    assert str(path) in str(caught.value)


def test_a_whole_conversion_says_it_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVRAG_MODELS", str(tmp_path / "cache"))
    write_gguf(tmp_path / "m.gguf", fields={"expert_count": 8})
    with pytest.raises(ModelLoadError, match=r"^cannot convert m: .*Mixtral.*safetensors instead$"):
        resolve_model(tmp_path / "m.gguf")
    assert not list((tmp_path / "cache").iterdir())
