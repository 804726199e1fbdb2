"""KVzip: its scores are kvpress's, each head keeps its own rows, and long chunks go in parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kvrag.errors import ParameterError, UnsupportedModelError
from kvrag.fusion.compression import kvzip
from kvrag.fusion.compression.encoding import Compressor
from kvrag.fusion.compression.kvzip import (
    keep_highest,
    keep_rebuilding,
    room_to_repeat,
    score_by_repeating,
)
from kvrag.fusion.compression.spec import Compression
from kvrag.kvcache import ChunkKV
from kvrag.models.kv_model import KVModel
from kvrag_testing.bench_top import relative_difference
from tests.fusion.golden import kvpress_scores as golden
from tests.support.models import FAMILIES, make_model, make_tokenizer

TEXT = (
    "Ines keeps the harbour ledger of Varn and writes each ship down before noon. She repaired the "
    "tall clock in the year of the flood, and the keeper paid her; Tomas was born near the river."
)


def ids_of(model: KVModel, text: str = TEXT) -> list[int]:
    return list(model.tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("part_tokens", golden.PART_TOKENS)
def test_scores_are_those_of_kvpress(part_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = KVModel(golden.make_filled_model(), make_tokenizer())
    as_bytes: Any = lambda text, add_special_tokens: {"input_ids": list(text.encode())}  # noqa: E731
    monkeypatch.setattr(model, "tokenizer", as_bytes)
    monkeypatch.setattr(kvzip, "_PART_TOKENS", part_tokens)
    _, scores = score_by_repeating(model, (), golden.token_ids())
    expected = load_file(golden.PATH)[f"parts_of_{part_tokens}"]
    assert expected.std() > 0.1 * expected.mean()
    torch.testing.assert_close(scores, expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "gpt2"])
def test_rows_are_those_of_a_prefill(family: str) -> None:
    model = KVModel(make_model(family), make_tokenizer())
    prefix, ids = model.default_prefix_ids(), ids_of(model)
    compressor = Compressor(model, Compression("kvzip", 0.5))
    kept = compressor.encode(prefix, ids)
    whole, scores = score_by_repeating(model, prefix, ids)
    (plain,) = model.prefill(prefix, [ids])
    assert relative_difference(whole.keys, plain.keys) < 1e-4
    assert relative_difference(whole.values, plain.values) < 1e-4
    assert kept.num_tokens == -(-len(ids) // 2)
    assert ((scores > 0.0) & (scores <= 1.0 + 1e-6)).sum() > scores.numel() // 5
    chosen = set()
    for layer in range(model.spec.num_layers):
        for head in range(model.spec.num_kv_heads):
            best = sorted(range(len(ids)), key=lambda i: (-scores[layer, head, i], -i))
            rows = sorted(best[: kept.num_tokens])
            chosen.add(tuple(rows))
            assert torch.equal(kept.keys[layer, head], whole.keys[layer, head, rows])
            assert torch.equal(kept.values[layer, head], whole.values[layer, head, rows])
    # A window much shorter than the chunk leaves the same rows to all heads: its last ones.
    assert len(chosen) > 1 or family == "mistral-sliding"


def test_a_window_hides_what_lies_before_it() -> None:
    model = KVModel(make_model("mistral-sliding"), make_tokenizer())
    ids = ids_of(model)
    _, scores = score_by_repeating(model, model.default_prefix_ids(), ids)
    request = len(ids_of(model, "\n\nRepeat the previous context exactly.")) + 1
    # The first to be computed stands right behind the chunk, and sees the most of it.
    assert model.windows[0] is not None
    unseen = len(ids) - (model.windows[0] - 1)
    assert unseen > 0
    assert request > 0
    assert torch.equal(scores[:, :, :unseen], torch.zeros_like(scores[:, :, :unseen]))
    assert (scores[:, :, unseen:] > 0).all()


def test_of_equal_scores_the_last_are_kept() -> None:
    keys = torch.arange(6.0).view(1, 1, 6, 1)
    kept = keep_highest(ChunkKV(keys, -keys), torch.tensor([[[0.0, 1.0, 1.0, 0.0, 1.0, 1.0]]]), 3)
    assert kept.keys.flatten().tolist() == [2.0, 4.0, 5.0]
    assert kept.values.flatten().tolist() == [-2.0, -4.0, -5.0]


def test_chunks_that_nearly_fill_the_context_go_in_small_parts() -> None:
    model = KVModel(make_model(max_position_embeddings=160), make_tokenizer())
    prefix = (model.tokenizer.bos_token_id,)
    whole = [5 + i % 200 for i in range(100)]
    kept = Compressor(model, Compression("kvzip", 0.75)).encode(prefix, whole)
    assert kept.num_tokens == 25
    assert kept.keys.isfinite().all()
    too_long = [5 + i % 200 for i in range(150)]
    with pytest.raises(ParameterError, match=r"150 tokens leaves 9 of the 160 .* smaller chunks"):
        Compressor(model, Compression("kvzip", 0.75)).encode(prefix, too_long)


def test_the_room_that_is_asked_for_is_the_least_that_does() -> None:
    model = KVModel(make_model(max_position_embeddings=160), make_tokenizer())
    prefix = model.default_prefix_ids()
    most = 160 - len(prefix) - room_to_repeat(model.tokenizer, 1)
    ids = [5 + i % 200 for i in range(most + 1)]
    assert keep_rebuilding(model, prefix, ids[:-1], Compression("kvzip", 0.9)).num_tokens > 0
    with pytest.raises(ParameterError, match="smaller chunks"):
        keep_rebuilding(model, prefix, ids, Compression("kvzip", 0.9))


def test_one_token_is_kept_whole() -> None:
    model = KVModel(make_model(), make_tokenizer())
    kept = Compressor(model, Compression("kvzip", 0.75)).encode(model.default_prefix_ids(), [7])
    (plain,) = model.prefill(model.default_prefix_ids(), [[7]])
    assert relative_difference(kept.keys, plain.keys) < 1e-4


def test_learned_positions_are_refused() -> None:
    model = KVModel(make_model("gpt2"), make_tokenizer())
    for kind in ("kvzip", "drop"):
        with pytest.raises(UnsupportedModelError, match="learned its positions"):
            Compressor(model, Compression(kind, 0.5))
