"""What rows gather now against what they gathered when they were encoded, by a slow reference."""

from __future__ import annotations

import pytest
import torch

from kvrag.kvcache import FusedKV
from kvrag.models.attention import EncodedScope
from kvrag.models.kv_model import KVModel
from kvrag.models.rows import RowPass
from tests.support.models import make_model, make_tokenizer

NUM_ROWS, NUM_PREFIX = 300, 2
# Chunks of several lengths, one of them a single token; the question stands alone.
BEGINNINGS = (2, 40, 41, 200, 290)


def _starts(rows: torch.Tensor) -> torch.Tensor:
    beginnings = torch.tensor([0, *BEGINNINGS])
    return beginnings[torch.searchsorted(beginnings, rows, right=True) - 1]


def _gathered(model: KVModel, ids: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """Return ``[N, heads * D]``: what the rows gather in layer 0, by the model's own forward."""
    seen = []
    attention = model.hf.base_model.layers[0].self_attn
    projection = getattr(attention, "o_proj", None) or attention.dense
    hook = projection.register_forward_pre_hook(lambda _, given: seen.append(given[0][0]))
    implementation = model.hf.config._attn_implementation
    model.hf.set_attn_implementation("eager")
    mask = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
    try:
        with torch.no_grad():
            by_kind = {"full_attention": mask[None, None], "sliding_attention": mask[None, None]}
            kinds = getattr(model.hf.config, "layer_types", None)
            model.hf(ids[None], attention_mask=by_kind if kinds else mask[None, None])
    finally:
        hook.remove()
        model.hf.set_attn_implementation(implementation)
    return seen[0]


@pytest.mark.parametrize("family", ["llama", "mistral-sliding", "qwen3", "gemma2", "phi3"])
@pytest.mark.parametrize(
    ("num_prefix", "chosen"), [(0, slice(None)), (NUM_PREFIX, slice(0, None, 7))]
)
def test_change_is_how_far_outputs_are_apart(family: str, num_prefix: int, chosen: slice) -> None:
    model = KVModel(make_model(family), make_tokenizer())
    ids = torch.randint(3, 50, (NUM_ROWS,), generator=torch.Generator().manual_seed(1))
    rows = torch.arange(NUM_ROWS)
    window = model.windows[0]
    now = rows <= rows[:, None]
    if window is not None:
        now &= rows > rows[:, None] - window
    then = now & ((rows >= _starts(rows)[:, None]) | (rows < num_prefix))
    expected = (_gathered(model, ids, now) - _gathered(model, ids, then)).square().sum(-1)

    fused = FusedKV(model.spec, NUM_ROWS, NUM_ROWS)
    of = RowPass(rows, fused, model.tables(NUM_ROWS))
    with model.computing_rows():
        hidden = model.embed(ids)
        # Puts the layer's K/V of all rows into the buffer.
        model.forward_rows(0, hidden.clone(), of)
        kept, some = hidden.clone(), rows[chosen].contiguous()
        encoded = EncodedScope(_starts(some), num_prefix)
        change = model.compare_rows(0, hidden[chosen], of.over(some), encoded=encoded)
    assert torch.equal(hidden, kept)
    assert torch.allclose(change, expected[chosen], atol=1e-5 * float(expected.max()))
    assert (expected[: BEGINNINGS[1]] < 1e-9).all() or num_prefix == 0
    assert float(expected.max()) > 0
