"""Models of each architecture that is read, written as GGUF as llama.cpp does, and read again."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

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
from kvrag.native.kernels import IS_COMPILED
from kvrag.weights import architectures
from kvrag.weights.architectures import ARCHITECTURES, Metadata, read_config
from kvrag.weights.packing import plan
from tests.support.gguf_files import write_gguf, write_model
from tests.support.models import SMALL

_BASE = {**SMALL, "num_hidden_layers": 2, "intermediate_size": 128}
_WITHOUT_RMS = ("Cohere2", "Nemotron", "Phi", "StableLm", "Starcoder2")
_LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 32.0, "low_freq_factor": 1.0},
    **{"high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
}
_YARN = {
    **{"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0},
    "original_max_position_embeddings": 512,
}
_SHORT, _LONG = ([1.0 + by * number for number in range(6)] for by in (0.1, 0.5))
_LONGROPE = {
    **{"rope_type": "longrope", "rope_theta": 10_000.0, "partial_rotary_factor": 0.75},
    **{"short_factor": _SHORT, "long_factor": _LONG, "attention_factor": 1.19},
    "original_max_position_embeddings": 512,
}
_SCALED_YARN = {
    **{"rope.freq_base": 1e6, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0},
    "rope.scaling.original_context_length": 512,
}
_STRONG_YARN = {
    **{**_YARN, "original_max_position_embeddings": 2048},
    "attention_factor": 1.2 * (1 + 0.1 * math.log(4)),
}
_LOCAL = {"rope_type": "default", "rope_theta": 10_000.0}
_GLOBAL = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}


def _array(numbers: list[float]) -> np.ndarray:
    return np.array(numbers, np.float32)


def _llama3_factors(width: int, factor: float = 32.0) -> dict[str, np.ndarray]:
    rope = {**_LLAMA3, "factor": factor}
    config = transformers.LlamaConfig(**_BASE, head_dim=width, rope_parameters=rope)
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    plain = _LLAMA3["rope_theta"] ** -(torch.arange(0, width, 2) / width)
    return {"rope_freqs.weight": (plain / rotary.inv_freq).numpy()}


def _rope(theta: float = 10_000.0, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {**_LOCAL, "rope_theta": theta, **more}}


_NONE: Mapping[str, Any] = MappingProxyType({})


class _Case(NamedTuple):
    architecture: str
    kind: str
    """The class of Transformers."""
    settings: Mapping[str, Any] = _NONE
    """What its configuration says beside sizes."""
    fields: Mapping[str, Any] = _NONE
    """What the file says."""
    tensors: Mapping[str, np.ndarray] = _NONE
    """Of the file, and no weights."""


_ROPE = {"rope.dimension_count": 16, "rope.freq_base": 10_000.0}
_WIDE = {"attention.key_length": 32, "attention.value_length": 32}
_HEAD = {"head_dim": 32}
_UNTIED = {"tie_word_embeddings": False}
_HALF = {"partial_rotary_factor": 0.5}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_EXPERTS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}
_GEMMA3 = {**_HEAD, "num_hidden_layers": 6, "query_pre_attn_scalar": 32, "sliding_window": 64}
_BOTH = {"rope_parameters": {"full_attention": _GLOBAL, "sliding_attention": _LOCAL}}
_WINDOW = {"attention.sliding_window": 64}
_THREE_OF_FOUR = {"attention.sliding_window_pattern": [True, True, True, False]}
_CASES = {
    "llama": _Case("llama", "Llama", {}, _ROPE),
    "llama-untied": _Case("llama", "Llama", _UNTIED, _ROPE),
    "llama-biases": _Case("llama", "Llama", {"attention_bias": True, "mlp_bias": True}, _ROPE),
    "llama-3.2": _Case(
        *("llama", "Llama"),
        {**_HEAD, "max_position_embeddings": 131_072, "rope_parameters": _LLAMA3},
        {"rope.dimension_count": 32, "rope.freq_base": 500_000.0},
        _llama3_factors(32),
    ),
    "llama-linear": _Case(
        *("llama", "Llama", _rope(rope_type="linear", factor=4.0)),
        {**_ROPE, "rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    ),
    "llama-none": _Case(
        *("llama", "Llama", {}),
        {**_ROPE, "rope.scaling.type": "none", "rope.scaling.factor": 4.0},
    ),
    "llama-linear-without-a-factor": _Case(
        *("llama", "Llama", {}),
        {**_ROPE, "rope.scaling.type": "linear", "rope.scaling.factor": 0.0},
    ),
    "mistral": _Case(
        *("llama", "Mistral", {**_HEAD, **_UNTIED, "sliding_window": None}),
        {**_WIDE, "rope.dimension_count": 32},
    ),
    "qwen2": _Case("qwen2", "Qwen2", {"rope_parameters": _YARN}, _SCALED_YARN),
    "qwen2-strong": _Case(
        *("qwen2", "Qwen2", {"rope_parameters": _STRONG_YARN}),
        {
            **{"rope.freq_base": 1e6, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0},
            "rope.scaling.attn_factor": 1.2,
        },
    ),
    "qwen3": _Case("qwen3", "Qwen3", {**_HEAD, **_rope(1e6)}, {**_WIDE, "rope.freq_base": 1e6}),
    "qwen3moe": _Case(
        "qwen3moe", "Qwen3Moe", {**_HEAD, **_MOE, "norm_topk_prob": True}, {**_WIDE, **_EXPERTS}
    ),
    "phi3": _Case("phi3", "Phi3", {**_UNTIED, "sliding_window": 64}, {**_ROPE, **_WINDOW}),
    "phi4-mini": _Case(
        *("phi3", "Phi3"),
        {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 512},
        {
            **{"rope.dimension_count": 12, "rope.scaling.original_context_length": 512},
            **{"rope.scaling.attn_factor": 1.19, "attention.sliding_window": 0},
        },
        {"rope_factors_long.weight": _array(_LONG), "rope_factors_short.weight": _array(_SHORT)},
    ),
    "gemma2": _Case(
        *("gemma2", "Gemma2"),
        {**_HEAD, "query_pre_attn_scalar": 32, "sliding_window": 64, **_CAPS},
        {**_WIDE, **_CAPS, **_WINDOW},
    ),
    "gemma3": _Case(
        *("gemma3", "Gemma3Text", {**_GEMMA3, **_BOTH}),
        {
            **{**_WIDE, **_WINDOW, "rope.freq_base": 1e6},
            **{"rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
        },
    ),
    "gemma3-1b-of-ollama": _Case(
        *("gemma3", "Gemma3Text"),
        {
            **_GEMMA3,
            "rope_parameters": {
                "full_attention": {**_LOCAL, "rope_theta": 2e6},
                "sliding_attention": {**_LOCAL, "rope_theta": 2e4},
            },
        },
        {
            **{**_WIDE, **_WINDOW, "attention.sliding_window_pattern": 6},
            **{"rope.global.freq_base": 2e6, "rope.local.freq_base": 2e4},
        },
    ),
    "gemma3-4b-of-ollama": _Case(
        *("gemma3", "Gemma3Text"),
        {**_GEMMA3, **_BOTH, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-6},
        {
            **{**_WIDE, **_WINDOW, "attention.layer_norm_rms_epsilon": None},
            "attention.sliding_window_pattern": [True] * 5 + [False],
        },
        {"v.patch_embedding.bias": _array([1.0]), "mm.mm_soft_emb_norm.weight": _array([1.0])},
    ),
    "starcoder2": _Case(
        *("starcoder2", "Starcoder2"),
        {"norm_epsilon": 1e-5, **_rope(1e5)},
        {"rope.freq_base": 1e5},
    ),
    "stablelm": _Case(
        *("stablelm", "StableLm", {"use_qkv_bias": True, **_rope(partial_rotary_factor=0.25)}),
        {"rope.dimension_count": 4},
    ),
    "mixtral": _Case(
        *("llama", "Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, **_rope()}),
        {**_ROPE, "expert_count": 4, "expert_used_count": 2},
    ),
    "mistral-small": _Case(
        *("mistral3", "Mistral", {**_HEAD, **_UNTIED, "sliding_window": None}),
        {**_WIDE, "rope.dimension_count": 32},
        {"v.patch_conv.weight": _array([1.0])},
    ),
    "ministral3": _Case(
        *("mistral3", "Ministral3"),
        {
            **_HEAD,
            "rope_parameters": {
                **{**_YARN, "original_max_position_embeddings": 64, "mscale": 1.0},
                **{"mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
                **{"beta_fast": 16.0, "beta_slow": 2.0},
            },
        },
        {
            **{**_WIDE, **_SCALED_YARN, "rope.dimension_count": 32},
            **{"rope.scaling.original_context_length": 64, "rope.scaling.yarn_log_multiplier": 1.0},
            **{"rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.yarn_beta_slow": 2.0},
            "attention.temperature_scale": 0.1,
        },
    ),
    "qwen2-vl": _Case(
        *("qwen2vl", "Qwen2", _rope(1e6)),
        {"rope.freq_base": 1e6, "rope.dimension_sections": [2, 3, 3, 0]},
    ),
    "qwen3-vl": _Case(
        *("qwen3vl", "Qwen3", {**_HEAD, **_rope(5e6)}),
        {
            **{**_WIDE, "rope.freq_base": 5e6, "rope.dimension_sections": [6, 5, 5, 0]},
            "n_deepstack_layers": 3,
        },
    ),
    "qwen3-vl-moe": _Case(
        *("qwen3vlmoe", "Qwen3Moe", {**_HEAD, **_MOE, "norm_topk_prob": True}),
        {**_WIDE, **_EXPERTS, "rope.dimension_sections": [6, 5, 5, 0]},
    ),
    "gpt-oss": _Case(
        *("gpt-oss", "GptOss"),
        {
            **{**_HEAD, **_UNTIED, "num_local_experts": 4, "num_experts_per_tok": 2},
            "sliding_window": 64,
            "rope_parameters": {**_YARN, "original_max_position_embeddings": 64, "truncate": False},
        },
        {
            **{**_WIDE, **_SCALED_YARN, **_EXPERTS, **_WINDOW, "expert_feed_forward_length": 128},
            **{"rope.scaling.original_context_length": 64, "rope.scaling.yarn_beta_fast": 32.0},
        },
    ),
    "phi2": _Case("phi2", "Phi", {**_UNTIED, **_rope(**_HALF)}, {"rope.dimension_count": 8}),
    "gemma": _Case("gemma", "Gemma", _HEAD, _WIDE),
    "granite": _Case(
        *("granite", "Granite"),
        {
            **{"attention_multiplier": 0.1, "embedding_multiplier": 6.0},
            **{"residual_multiplier": 0.5, "logits_scaling": 4.0},
        },
        {
            **{**_ROPE, "attention.scale": 0.1, "embedding_scale": 6.0},
            **{"residual_scale": 0.5, "logit_scale": 4.0},
        },
    ),
    "smollm3": _Case(
        *("smollm3", "SmolLM3", {"num_hidden_layers": 4, **_rope(5e6)}),
        {**_ROPE, "rope.freq_base": 5e6},
    ),
    "olmo2": _Case("olmo2", "Olmo2", {**_UNTIED, **_rope(5e5)}, {"rope.freq_base": 5e5}),
    "olmo3": _Case(
        *("olmo2", "Olmo3"),
        {
            **{**_UNTIED, "num_hidden_layers": 4, "sliding_window": 64},
            "rope_parameters": {
                "full_attention": {**_YARN, "attention_factor": 1.2},
                "sliding_attention": {**_LOCAL, "rope_theta": 1e6},
            },
        },
        {**_SCALED_YARN, "rope.scaling.yarn_attn_factor": 1.2, **_WINDOW, **_THREE_OF_FOUR},
    ),
    "cohere2": _Case(
        *("cohere2", "Cohere2"),
        {"num_hidden_layers": 4, "sliding_window": 64, "logit_scale": 0.25},
        {**_ROPE, **_WINDOW, "logit_scale": 0.25, "rope.scaling.type": "none"},
    ),
    "glm4": _Case(
        *("glm4", "Glm4", {**_HEAD, **_UNTIED, "attention_bias": True, **_rope(**_HALF)}),
        {**_WIDE, "rope.dimension_count": 16},
    ),
    "glm4-without-biases": _Case(
        *("glm4", "Glm4", {**_HEAD, "attention_bias": False, **_rope(**_HALF)}),
        {**_WIDE, "rope.dimension_count": 16},
    ),
    "exaone4-32b": _Case(
        *("exaone4", "Exaone4"),
        {
            **{**_HEAD, **_UNTIED, "num_hidden_layers": 4, "sliding_window": 64},
            "rope_parameters": {**_LLAMA3, "factor": 16.0},
        },
        {**_WIDE, **_WINDOW, **_THREE_OF_FOUR, "rope.freq_base": 500_000.0},
        _llama3_factors(32, 16.0),
    ),
    "exaone4-1.2b": _Case(
        *("exaone4", "Exaone4"),
        {"num_hidden_layers": 4, "sliding_window": None, "layer_types": ["full_attention"] * 4},
    ),
    "seed-oss": _Case(
        *("seed_oss", "SeedOss"),
        {**_HEAD, **_UNTIED, "attention_bias": True, "attention_out_bias": False, **_rope(1e7)},
        {**_WIDE, "rope.freq_base": 1e7},
    ),
    "nemotron": _Case("nemotron", "Nemotron", _rope(**_HALF), {"rope.dimension_count": 8}),
}


def made(name: str, path: Path, **more: Any) -> PreTrainedModel:
    """Write a case's file; return its model with the weights that the file has, in float32."""
    architecture, kind, settings, fields, tensors = _CASES[name]
    sizes = {**_BASE, "tie_word_embeddings": True, **settings, **more}
    if kind not in _WITHOUT_RMS:
        sizes.setdefault("rms_norm_eps", 1e-5)
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
        (
            {"architecture": "rwkv6"},
            r"architecture 'rwkv6': as GGUF, kvrag reads llama, .*nemotron;",
        ),
        ({"has_tokenizer": False}, "has no tokenizer"),
        ({"fields": {"block_count": None}}, r"does not say llama\.block_count"),
        ({"fields": {"attention.head_count": [4, 2]}}, "for each layer"),
        ({"fields": {"expert_count": 8}}, r"does not say llama\.expert_used_count"),
        ({"fields": {"context_length": 0}}, "says 0 positions, 64 numbers a row, 4 heads and 2 of"),
        ({"fields": {"attention.head_count_kv": 3}}, "4 heads and 3 of keys: expected at least 1"),
        ({"fields": {"rope.scaling.factor": -2.0}}, "scales RoPE by -2: expected more than 0"),
        ({"fields": {"nextn_predict_layers": 1}}, r"says llama\.nextn_predict_layers, which kvrag"),
        ({"fields": {"rope.scaling.yarn_ext_factor": 0.5}}, "extrapolates yarn"),
        ({"fields": {"attention.value_length": 8}}, "keys of 16 numbers and values of 8"),
        ({"fields": {"rope.dimension_count": 8, "attention.key_length": 16}}, "rotates 8 of"),
        ({"fields": {"attention.causal": False}}, "reads in both directions"),
        (
            {
                "architecture": "gemma3",
                "fields": {"attention.key_length": 16, "attention.sliding_window_pattern": [True]},
            },
            "sliding_window_pattern for 1 of 2 layers",
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
    write_gguf(tmp_path / "m.gguf", fields={"attention.causal": False})
    with pytest.raises(ModelLoadError, match=r"^cannot convert m: .*both.*safetensors instead$"):
        resolve_model(tmp_path / "m.gguf")
    assert not list((tmp_path / "cache").glob("[!.]*"))
