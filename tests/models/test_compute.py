"""In which precision a model computes: what is asked for, what is chosen, and what stays exact."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

import pytest
import torch

from kvrag.errors import ParameterError
from kvrag.fusion.policies.deviation import DeviationPolicy
from kvrag.models import compute as module
from kvrag.models.compute import fastest, measured, resolved_compute
from kvrag.models.kv_model import KVModel
from kvrag_testing.bench_top import Bench, relative_difference
from tests.support.models import make_model, make_tokenizer
from tests.support.properties import every

_ALL = DeviationPolicy(ratio=1.0)


@pytest.mark.parametrize(
    ("own", "seconds", "chosen"),
    [
        ("float32", {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0}, "int8"),
        ("float32", {"float32": 4.0, "bfloat16": 2.0, "int8": 3.0}, "bfloat16"),
        ("float32", {"float32": 1.0, "bfloat16": 9.0, "int8": 9.0}, "float32"),
        # A gain within the noise does not pay for what rounding loses.
        ("float32", {"float32": 1.0, "bfloat16": 0.9, "int8": 0.87}, "float32"),
        ("float32", {"float32": 4.0, "bfloat16": 2.0, "int8": 1.9}, "bfloat16"),
        ("bfloat16", {"bfloat16": 2.0, "float32": 1.0, "int8": 0.9}, "float32"),
        ("bfloat16", {"bfloat16": 2.0, "float32": 3.0, "int8": 1.0}, "int8"),
        ("float16", {"float16": 9.0, "float32": 3.0, "bfloat16": 2.0, "int8": 1.0}, "int8"),
    ],
)
def test_the_fastest_is_chosen(own: str, seconds: Mapping[str, float], chosen: str) -> None:
    assert fastest(own, seconds) == chosen


def test_eight_bits_are_refused_without_compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IS_COMPILED", False)
    hf = make_model()
    assert "int8" not in measured(hf)
    with pytest.raises(ParameterError, match="8 bits need kvrag's compiled kernels"):
        resolved_compute(hf, "int8")


def test_auto_takes_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    hf = make_model()
    for name in ("float32", "bfloat16", "int8"):
        seconds = dict.fromkeys(("float32", "bfloat16", "int8"), 1.0) | {name: 0.1}
        monkeypatch.setattr(module, "measured", lambda _, given=seconds: given)
        assert resolved_compute(hf, "auto") == name


def test_measuring_times_each_precision_and_leaves_the_model_as_it_was() -> None:
    hf = make_model()
    before = {name: one.clone() for name, one in hf.state_dict().items()}
    seconds = measured(hf)
    assert list(seconds) == ["float32", "bfloat16", "int8"]
    assert all(0 < one < 1 for one in seconds.values())
    assert all(torch.equal(one, before[name]) for name, one in hf.state_dict().items())


def test_a_precision_that_does_not_exist() -> None:
    with pytest.raises(ParameterError, match="compute 'int3': expected one of auto, float32"):
        KVModel.load("kvrag-tiny", compute="int3")


def test_models_with_layers_of_their_own_kind_keep_their_type() -> None:
    hf = make_model("gpt2")
    assert resolved_compute(hf, "auto") == "float32"
    with pytest.raises(ParameterError, match="computes in its weights' type, float32: 'gpt2'"):
        resolved_compute(hf, "int8")


def test_a_model_can_be_had_in_several_precisions() -> None:
    own = KVModel.load("kvrag-tiny")
    rough = KVModel.load("kvrag-tiny", compute="int8")
    assert (own.compute, rough.compute) == ("float32", "int8")
    assert KVModel.load("kvrag-tiny", compute="int8") is rough
    also = KVModel.load(own, compute="int8")
    assert also.decoder is own.decoder
    assert also.compute == "int8"
    assert also.fingerprint == own.fingerprint == rough.fingerprint
    assert KVModel.load(own) is own


@pytest.mark.parametrize(
    ("family", "compute"),
    every(
        3,
        product(("llama", "qwen3", "gemma2", "bloom"), ("float32", "bfloat16", "int8", "int4")),
    ),
)
def test_ratio_one_equals_the_same_engines_prefill(family: str, compute: str) -> None:
    """Prefill without any chunk and fusion that recomputes everything give the same bits."""
    model = KVModel(make_model(family), make_tokenizer(), compute=compute)
    bench = Bench(model)
    # No chunk stands where it was encoded: such rows would be taken as they are stored.
    prompt = "Context:\n" + bench.prompt(2, 0, 3, 1)
    fused = bench.fuse(prompt, _ALL)
    assert fused.report.num_exact == 0
    assert fused.report.compute == compute
    assert (f"computed in {compute}" in fused.report.one_line()) == (compute in ("int8", "int4"))
    plain = Bench(model, texts=()).fuse(prompt, _ALL)
    assert plain.report.num_fresh == plain.report.num_tokens
    assert torch.equal(fused.logits, plain.logits)
    exact = relative_difference(fused.logits, bench.plain_logits(prompt))
    bounds = {"float32": 1e-4, "bfloat16": 0.1, "int8": 0.5, "int4": 5.0}
    assert exact < bounds[compute]
    if compute != "float32":
        assert exact > 1e-4  # it really computes in it


def test_what_is_stored_does_not_depend_on_it() -> None:
    hf, tokenizer = make_model(), make_tokenizer()
    own = KVModel(hf, tokenizer).prefill((), [range(5, 60)])[0]
    rough = KVModel(hf, tokenizer, compute="int8").prefill((), [range(5, 60)])[0]
    for name in ("keys", "values"):
        assert torch.equal(getattr(own, name), getattr(rough, name))
