"""Quantised checkpoints compute what Transformers does with them, by their own modules."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel, TorchAoConfig

from kvrag.errors import ModelLoadError, ParameterError, UnsupportedModelError
from kvrag.fusion.decoding import make_decoder, step_all
from kvrag.fusion.policies.two_stage import TwoStagePolicy
from kvrag.models import quantised, weightfiles
from kvrag.models.kv_model import KVModel
from kvrag.models.loading import model_fingerprint
from kvrag.models.pretrained import load_weights
from kvrag.models.quantised import FORMATS, check_quantised
from kvrag.models.shards import check_shards
from kvrag_testing.bench_top import bench_of, relative_difference
from tests.support.models import make_model, make_tokenizer

_CPU = torch.device("cpu")


def _compressed(folder: Path, preset: str) -> None:
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationConfig,
        apply_quantization_config,
        preset_name_to_scheme,
    )

    model = make_model()
    scheme = preset_name_to_scheme(preset, targets=["Linear"])
    if scheme.weights.group_size:
        scheme.weights.group_size = 32
    apply_quantization_config(
        model,
        QuantizationConfig(
            config_groups={"all": scheme}, ignore=["lm_head"], quantization_status="frozen"
        ),
    )
    most = 448.0 if scheme.weights.type == "float" else 2 ** (scheme.weights.num_bits - 1) - 1
    for layer in model.modules():
        if (scale := getattr(layer, "weight_scale", None)) is not None:
            rows = layer.weight.data.unflatten(-1, (scale.shape[1], -1))
            scale.data.copy_(rows.abs().amax(-1) / most)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)


def _by_transformers(folder: Path, config: Any) -> None:
    make_model(intermediate_size=128).save_pretrained(folder / "whole")
    model = AutoModelForCausalLM.from_pretrained(folder / "whole", quantization_config=config)
    model.save_pretrained(folder)


def _rewritten(
    folder: Path,
    family: str,
    described: dict[str, Any],
    write: Callable[[str, torch.Tensor], Iterator[tuple[str, torch.Tensor]]],
) -> None:
    make_model(family).save_pretrained(folder)
    path = folder / "model.safetensors"
    pairs = (pair for given in load_file(path).items() for pair in write(*given))
    written = {name: tensor.contiguous() for name, tensor in pairs}
    save_file(written, path, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": described}))


def _eighths(name: str, weight: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    if not name.endswith("proj.weight"):
        yield name, weight
        return
    scale = weight.abs().max() / 448
    yield name, (weight / scale).to(torch.float8_e4m3fn)
    yield f"{name}_scale_inv", scale.reshape(1, 1)


def _fourths(name: str, weight: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        yield name, weight
        return
    drawn = torch.Generator().manual_seed(len(name))
    experts, inputs, outputs = weight.shape
    shape = experts, outputs, inputs // 32
    blocks = torch.randint(0, 256, (*shape, 16), generator=drawn, dtype=torch.uint8)
    yield f"{name}_blocks", blocks
    scales = torch.randint(120, 124, shape, generator=drawn, dtype=torch.uint8)
    yield f"{name}_scales", scales


def _packed(rows: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """Return ``[r, c]`` numbers of 4 bits as ``[r, c / 8]``."""
    parts = [rows[:, place::8].long() << (4 * at) for at, place in enumerate(order)]
    return torch.stack(parts).sum(0).to(torch.int64).to(torch.int32)


def _in_groups(is_awq: bool, name: str, weight: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a layer's weights in 4 bits by 32 inputs, in the order of AWQ or GPTQ."""
    if not name.endswith("proj.weight"):
        yield name, weight.half()
        return
    name, groups = name.removesuffix("weight"), weight.unflatten(1, (-1, 32))
    least, most = groups.aminmax(dim=2, keepdim=True)
    scale = (most - least) / 15
    zero = (-least / scale).round().clamp(0, 15)
    levels = (groups / scale + zero).round().clamp(0, 15).flatten(1)
    order = (0, 2, 4, 6, 1, 3, 5, 7) if is_awq else tuple(range(8))
    yield f"{name}qweight", _packed(levels.T, order) if is_awq else _packed(levels, order).T
    yield f"{name}qzeros", _packed(zero[..., 0].T - int(not is_awq), order)
    yield f"{name}scales", scale[..., 0].T.half()
    if not is_awq:
        yield f"{name}g_idx", (torch.arange(weight.shape[1]) // 32).int()


def _torchao(folder: Path) -> None:
    from torchao.quantization import Int8WeightOnlyConfig

    _by_transformers(folder, TorchAoConfig(Int8WeightOnlyConfig()))


_EIGHTHS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
_FOURTHS = {"quant_method": "mxfp4", "modules_to_not_convert": ["self_attn", "router", "lm_head"]}
_AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
_GPTQ: dict[str, Any] = {**_AWQ, "quant_method": "gptq", "desc_act": False, "sym": False}
# Where rows are rounded to 8 bits, or 16, the last bit of one number moves a whole level.
_EXACT, _ROUNDED = 1e-4, 0.3
_MAKERS: dict[str, tuple[str, float, Callable[[Path], None]]] = {
    "w4a16": ("compressed-tensors", _EXACT, lambda folder: _compressed(folder, "W4A16")),
    "w8a8": ("compressed-tensors", _ROUNDED, lambda folder: _compressed(folder, "W8A8")),
    "w8a8 in floats": (
        "compressed-tensors",
        _ROUNDED,
        lambda folder: _compressed(folder, "FP8_DYNAMIC"),
    ),
    "fp8": ("fp8", _EXACT, lambda folder: _rewritten(folder, "llama", _EIGHTHS, _eighths)),
    "mxfp4": ("mxfp4", _EXACT, lambda folder: _rewritten(folder, "gpt-oss", _FOURTHS, _fourths)),
    "nf4": (
        "bitsandbytes",
        _ROUNDED,
        lambda folder: _by_transformers(folder, BitsAndBytesConfig(load_in_4bit=True)),
    ),
    "int8": (
        "bitsandbytes",
        _ROUNDED,
        lambda folder: _by_transformers(folder, BitsAndBytesConfig(load_in_8bit=True)),
    ),
    "torchao": ("torchao", _EXACT, _torchao),
    "gptq": (
        "gptq",
        _ROUNDED,
        lambda folder: _rewritten(folder, "llama", _GPTQ, partial(_in_groups, False)),
    ),
    "awq": (
        "awq",
        _ROUNDED,
        lambda folder: _rewritten(folder, "llama", _AWQ, partial(_in_groups, True)),
    ),
}


def made(folder: Path, kind: str) -> Path:
    """Return a folder with a small checkpoint; skip the test without what reads its kind."""
    method, _, make = _MAKERS[kind]
    for package in FORMATS[method].packages:
        pytest.importorskip(package.replace("-", "_"))
    make(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", _MAKERS)
def test_ratio_one_and_answers_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    folder, near = made(tmp_path, kind), _MAKERS[kind][1]
    dtype = torch.float16 if kind in ("awq", "gptq") else torch.float32
    plain: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    with torch.no_grad():
        plain(torch.arange(10, 20)[None])  # some lay their bytes out at first
    model = KVModel.load(folder, dtype=dtype)
    fingerprint = model.fingerprint
    bench = bench_of(model)
    prompt = bench.prompt(2, 0, 3, 1)
    ids = [*bench.lay_out(prompt).token_ids, 40]
    with torch.no_grad():
        expected = plain(torch.tensor([ids])).logits[0]
    fused = bench.fuse(prompt, TwoStagePolicy(ratio=1.0))
    assert relative_difference(fused.logits, expected[-2]) < near
    assert (
        relative_difference(bench.fuse(prompt, TwoStagePolicy(ratio=0.15)).logits, expected[-2])
        > near
    )
    (logits,) = step_all([(make_decoder(model, fused, None), 40)])
    assert isinstance(logits, torch.Tensor)
    assert relative_difference(logits, expected[-1]) < near
    # Of the file's bytes, whatever computing has made of them.
    del model, bench, fused
    assert KVModel.load(folder, dtype=dtype).fingerprint == fingerprint


@pytest.mark.parametrize("kind", ["w4a16", "fp8"])
def test_one_byte_makes_another_model(tmp_path: Path, kind: str) -> None:
    folder = made(tmp_path, kind)
    path = folder / "model.safetensors"
    before, weights = model_fingerprint(load_weights(folder, None, None)), load_file(path)
    packed = next(one for name, one in weights.items() if "q_proj.weight" in name and one.ndim == 2)
    packed.view(torch.uint8)[0, 0] ^= 1
    save_file(weights, path, {"format": "pt"})
    assert model_fingerprint(load_weights(folder, None, None)) != before


def test_other_precisions_are_refused_over_quantised_weights(tmp_path: Path) -> None:
    model = KVModel.load(made(tmp_path, "w4a16"))
    assert model.compile() is None
    with pytest.raises(ParameterError, match="quantised already, and their own modules compute"):
        model._computing_in("int8")
    with pytest.raises(UnsupportedModelError, match="does not split quantised weights"):
        check_shards(model.hf.config, 2)


@pytest.mark.parametrize(
    ("described", "message"),
    [
        *(
            ({"quant_method": method, "bits": 4}, f"pip install accelerate {packages}")
            for method, packages in (
                ("awq", "gptqmodel"),
                ("gptq", "gptqmodel optimum"),
                ("bitsandbytes", "bitsandbytes"),
                ("compressed-tensors", "compressed-tensors"),
                ("torchao", "torchao"),
            )
        ),
        ({"load_in_4bit": True}, "'bitsandbytes'.*pip install accelerate bitsandbytes"),
        ({"quant_method": "fbgemm_fp8"}, "'fbgemm_fp8'.*no kernel for CPUs"),
        ({"quant_method": "of mine"}, "'of mine'.*no kernel for CPUs"),
        ({"bits": 4}, "'None'.*no kernel for CPUs"),
    ],
)
def test_what_is_missing_is_named_before_weights_are_looked_for(
    tmp_path: Path, described: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantised, "find_spec", lambda _: None)
    config = {"model_type": "llama", "quantization_config": described}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=message):
        KVModel.load(tmp_path)


def test_a_wrong_description_is_told(tmp_path: Path) -> None:
    described = {"quant_method": "fp8", "weight_block_size": [7]}
    with pytest.raises(ModelLoadError, match=r"'fp8'.*weight_block_size must be a tuple of two"):
        check_quantised("a model", described, _CPU)


def test_only_the_cpu_widens_what_it_has_no_kernel_for() -> None:
    card = torch.device("cuda")
    for described in (_EIGHTHS, _FOURTHS):
        assert check_quantised("a model", described, _CPU)["dequantize"]
        assert "dequantize" not in check_quantised("a model", described, card)


def test_packed_weights_are_counted_as_the_numbers_they_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = made(tmp_path, "w4a16")
    monkeypatch.setattr(weightfiles, "_SPARE_ELEMENTS", 0)
    monkeypatch.setattr(weightfiles, "_SPARE_FACTOR", 2)
    assert load_weights(folder, None, None)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match="describes a model of"):
        load_weights(folder, None, None)
