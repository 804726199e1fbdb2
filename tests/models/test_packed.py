"""Linear layers in oneDNN's layout compute what they did."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from kvrag.errors import ParameterError
from kvrag.models.kv_model import KVModel
from kvrag.models.packed import PackedLinear, pack_linears
from tests.support.models import make_model, make_tokenizer


@pytest.mark.parametrize("family", ["llama", "qwen2", "falcon-rope", "gpt2"])
def test_a_packed_model_computes_what_it_did(family: str) -> None:
    model = make_model(family)
    plain = [one for one in model.base_model.modules() if type(one) is nn.Linear]
    ids = torch.arange(3, 60)[None]
    with torch.no_grad():
        expected = model(ids).logits
        assert pack_linears(model) == len(plain)
        found = model(ids).logits
    assert torch.allclose(found, expected, atol=1e-5)
    # Those of families' own kinds are left as they are.
    assert bool(plain) == (family in ("llama", "qwen2"))
    packed = [one for one in model.modules() if isinstance(one, PackedLinear)]
    assert len(packed) == len(plain)


def test_the_weights_as_they_were_are_let_go_of() -> None:
    model = make_model("llama")
    in_layers = sum(
        one.weight.numel() for one in model.base_model.modules() if type(one) is nn.Linear
    )
    before = sum(one.numel() for one in model.parameters())
    pack_linears(model)
    assert sum(one.numel() for one in model.parameters()) == before - in_layers
    assert isinstance(model.lm_head, nn.Linear)
    assert pack_linears(model) == 0  # a second time there is nothing left


def test_a_fingerprint_read_before_is_kept() -> None:
    model = KVModel(make_model("llama"), make_tokenizer())
    before = model.fingerprint
    pack_linears(model.hf)
    assert model.fingerprint == before
    with pytest.raises(ParameterError, match=r"q_proj\.weight is packed for oneDNN"):
        _ = KVModel(model.hf, model.tokenizer).fingerprint


def test_it_is_not_saved_without_its_weights(tmp_path: Path) -> None:
    model = make_model("llama")
    pack_linears(model)
    with pytest.raises(ParameterError, match="cannot be saved"):
        model.save_pretrained(tmp_path)


def test_types_that_it_does_not_multiply_stay_as_they_are() -> None:
    model = make_model("llama", dtype=torch.float16)
    assert pack_linears(model) == 0


def test_bfloat16_as_well_where_the_processor_has_it() -> None:
    linear = nn.Linear(64, 48, dtype=torch.bfloat16)
    inputs = torch.randn(5, 64, dtype=torch.bfloat16)
    model = make_model("llama", dtype=torch.bfloat16)
    if not pack_linears(model):
        pytest.skip("this processor does not multiply bfloat16 by oneDNN")
    with torch.no_grad():
        found = PackedLinear(linear)(inputs)
        assert torch.allclose(found, linear(inputs), atol=2e-2)
