"""Linear layers in oneDNN's layout compute what they did."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from kvrag.errors import ParameterError
from kvrag.models.kv_model import KVModel
from kvrag.models.linears import PackedLinear, pack_linears
from tests.support.models import make_model, make_tokenizer

has_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(),  # type: ignore[no-untyped-call]
    reason="torch was built without oneDNN",
)


@has_onednn
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
    assert pack_linears(model) == 0  # a second time there is nothing left


def test_what_cannot_be_multiplied_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pack_linears(make_model("llama", dtype=torch.float16)) == 0
    monkeypatch.setattr("torch.backends.mkldnn.is_available", lambda: False)
    assert pack_linears(make_model("llama")) == 0


@has_onednn
def test_one_layer_at_a_time_is_in_memory_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    weights: list[weakref.ref[torch.Tensor]] = []
    in_memory: list[int] = []
    make = PackedLinear.__init__

    def make_and_count(self: PackedLinear, linear: nn.Linear) -> None:
        weights.append(weakref.ref(linear.weight))
        in_memory.append(sum(one() is not None for one in weights))
        make(self, linear)

    monkeypatch.setattr(PackedLinear, "__init__", make_and_count)
    assert pack_linears(make_model("llama")) == len(in_memory)
    assert max(in_memory) <= 2


class _RowCounts(TorchDispatchMode):
    """Notes of how many rows the layers' products are."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.mkldnn._linear_pointwise.default:
            self.seen.add(args[0].numel() // args[0].shape[-1])
        return func(*args, **(kwargs or {}))


@has_onednn
def test_few_shapes_are_multiplied_however_many_rows_there_are() -> None:
    linear = nn.Linear(64, 48)
    packed, counts = PackedLinear(linear), _RowCounts()
    with torch.no_grad(), counts:
        for num_rows in range(129):
            inputs = torch.randn(1, num_rows, 64)
            assert torch.allclose(packed(inputs), linear(inputs), atol=1e-5)
        assert torch.allclose(packed(inputs[0, 5]), linear(inputs[0, 5]), atol=1e-5)
    assert len(counts.seen - {0}) == 8


@has_onednn
def test_a_fingerprint_read_before_is_kept_and_others_are_refused(tmp_path: Path) -> None:
    model = KVModel(make_model("llama"), make_tokenizer())
    before = model.fingerprint
    pack_linears(model.hf)
    assert model.fingerprint == before
    with pytest.raises(ParameterError, match=r"q_proj\.weight is packed for oneDNN"):
        _ = KVModel(model.hf, model.tokenizer).fingerprint
    with pytest.raises(ParameterError, match="cannot be saved"):
        model.hf.save_pretrained(tmp_path)
