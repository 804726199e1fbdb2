"""Anchors: what they see, what is stored of them, and files that are not what they should be."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kvrag.errors import AnchorsError
from kvrag.fusion.compression import spec
from kvrag.fusion.compression.anchors import (
    FILE_NAME,
    Anchors,
    Compressor,
    anchored_rows,
    encode_anchors,
    find_anchors,
    num_slots,
)
from kvrag.fusion.compression.spec import Compression, parse_compression
from kvrag.models.kv_model import KVModel
from kvrag.models.writers import CACHE_ARGUMENT
from kvrag_testing.bench_top import relative_difference
from tests.support.models import make_model, make_tokenizer

RATES = (0.5, 0.75)
FAMILIES = ("llama", "llama-yarn", "mistral-sliding", "qwen3", "phi3", "gemma2", "gemma3")
TEXT = (
    "Ines keeps the harbour ledger of Varn and writes each ship down before noon. She repaired the "
    "tall clock in the year of the flood, and the keeper paid her; Tomas was born near the river."
)


def make_anchors(model: KVModel, size: float = 0.3, rates: tuple[float, ...] = RATES) -> Anchors:
    random = torch.Generator().manual_seed(3)
    table = size * torch.randn(num_slots(rates), model.hf.config.hidden_size, generator=random)
    return Anchors(rates, model.fingerprint, table)


@pytest.fixture(scope="module")
def model() -> KVModel:
    return KVModel(make_model(), make_tokenizer())


def ids_of(model: KVModel) -> list[int]:
    return list(model.tokenizer(TEXT, add_special_tokens=False)["input_ids"])


@torch.no_grad()
def reference(
    model: KVModel, ids: list[int], rate: float, anchors: Anchors, block: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return each layer's placed K/V of the anchors, the mask written out row by row."""
    prefix = list(model.default_prefix_ids())
    stands, blocks, slots = [], [], []
    first_slot = 0 if rate == RATES[0] else Compression("anchors", RATES[0]).num_rows(block)
    for begin in range(0, len(ids), block):
        length = len(ids[begin : begin + block])
        count = -(-length // round(1 / (1 - rate)))
        for place in range(count):
            stands.append(begin + (place + 1) * length // count - 1)
            blocks.append(begin // block)
            slots.append(first_slot + place)
    tokens = [*prefix, *ids, *(ids[i] for i in stands)]
    positions = [*range(len(prefix) + len(ids)), *(len(prefix) + i for i in stands)]
    first = len(prefix) + len(ids)
    allowed = torch.zeros(len(tokens), len(tokens), dtype=torch.bool)
    for row in range(first):
        allowed[row, : row + 1] = True
    for number, mine in enumerate(blocks):
        allowed[first + number, : len(prefix)] = True
        begin = len(prefix) + mine * block
        allowed[first + number, begin : min(begin + block, first)] = True
        for other, its in enumerate(blocks):
            allowed[first + number, first + other] = its < mine
    where = torch.tensor(positions)
    embeds = model.hf.base_model.get_input_embeddings()(torch.tensor(tokens))
    embeds[first:] += anchors.embeddings[slots]
    window = getattr(model.hf.config, "sliding_window", None)
    masks: Any = allowed[None, None]
    if window is not None and model.hf.config.model_type not in ("llama", "gpt_neox"):
        near = (allowed & (where[None, :] > where[:, None] - window))[None, None]
        masks = {"full_attention": masks, "sliding_attention": near}
        if model.hf.config.model_type in ("mistral", "phi3"):
            masks = near
    if model.hf.config._attn_implementation == "eager":

        def additive(mask: torch.Tensor) -> torch.Tensor:
            return torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)

        masks = (
            {name: additive(mask) for name, mask in masks.items()}
            if isinstance(masks, dict)
            else additive(masks)
        )
    output = model.hf(
        inputs_embeds=embeds[None], position_ids=where[None], attention_mask=masks, use_cache=True
    )
    cache = getattr(output, CACHE_ARGUMENT)
    # The last rows of each: a sliding layer's cache drops others.
    return [(layer.keys[0], layer.values[0]) for layer in cache.layers]


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("family", FAMILIES)
def test_anchors_see_their_block_and_earlier_anchors(
    monkeypatch: pytest.MonkeyPatch, family: str, rate: float
) -> None:
    monkeypatch.setattr(spec, "BLOCK_TOKENS", 20)
    monkeypatch.setattr("kvrag.fusion.compression.anchors.BLOCK_TOKENS", 20)
    model = KVModel(make_model(family), make_tokenizer())
    ids = ids_of(model)[:45]
    anchors = make_anchors(model)
    compression = Compression("anchors", rate)
    kv = encode_anchors(model, model.default_prefix_ids(), ids, compression, anchors)
    assert kv.num_tokens == compression.num_rows(len(ids))
    num_before = len(model.default_prefix_ids())
    places = torch.tensor([num_before + i for i in compression.anchored_tokens(len(ids))])
    expected = reference(model, ids, rate, anchors, 20)
    for layer_index, table in enumerate(model.tables(num_before + len(ids))):
        placed = torch.empty_like(kv.keys[layer_index])
        table.place(kv.keys[layer_index], places, placed)
        keys, values = expected[layer_index]
        assert relative_difference(placed, keys[:, -len(places) :]) < 1e-4
        assert relative_difference(kv.values[layer_index], values[:, -len(places) :]) < 1e-4


def test_an_untrained_anchor_of_the_last_token_is_that_token(model: KVModel) -> None:
    """Rows of zero: what the last anchor of a block sees is what its token has seen."""
    ids = ids_of(model)
    prefix = model.default_prefix_ids()
    compression = Compression("anchors", 0.75)
    kv = encode_anchors(model, prefix, ids, compression, make_anchors(model, 0.0))
    (whole,) = model.prefill(prefix, [ids])
    assert relative_difference(kv.keys[:, :, -1], whole.keys[:, :, -1]) < 1e-4
    assert relative_difference(kv.values[:, :, -1], whole.values[:, :, -1]) < 1e-4
    # The first layer's K/V depend on no other token, so there all anchors are their tokens.
    stands = compression.anchored_tokens(len(ids))
    assert relative_difference(kv.values[0], whole.values[0][:, stands]) < 1e-4


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 5, 99, 100, 101, 237, 300])
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.75, 0.99])
def test_rows_are_as_many_as_promised_and_ascend(num_tokens: int, rate: float) -> None:
    for kind in ("drop", "anchors"):
        compression = Compression(kind, rate)
        assert 1 <= compression.num_rows(num_tokens) <= num_tokens
        assert compression.num_rows(num_tokens) >= (1 - rate) * num_tokens - 1e-6
        assert parse_compression(str(compression)) == compression
    stands = Compression("anchors", rate).anchored_tokens(num_tokens)
    assert len(stands) == Compression("anchors", rate).num_rows(num_tokens)
    assert stands == sorted(set(stands))
    assert stands[-1] == num_tokens - 1
    laid = anchored_rows((7,), range(num_tokens), Compression("anchors", rate), (rate,))
    assert laid.num_anchors == len(stands)
    assert max(laid.slots) < num_slots((rate,))


def test_rates_do_not_share_rows_of_the_table() -> None:
    rows = [
        set(anchored_rows((), range(250), Compression("anchors", rate), RATES).slots) - {-1}
        for rate in RATES
    ]
    assert not rows[0] & rows[1]
    assert rows[0] | rows[1] == set(range(num_slots(RATES)))


def test_a_file_gives_back_what_was_written(tmp_path: Path, model: KVModel) -> None:
    anchors = make_anchors(model)
    anchors.save(tmp_path / FILE_NAME)
    again = Anchors.load(tmp_path / FILE_NAME)
    assert torch.equal(again.embeddings, anchors.embeddings)
    assert again.digest == anchors.digest
    assert replace(anchors, embeddings=anchors.embeddings + 1e-6).digest != anchors.digest
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


@pytest.mark.parametrize(
    ("header", "shape", "message"),
    [
        (None, None, "its metadata has no"),
        ({"version": 2}, None, "anchors of format 2, expected 1"),
        ({"rates": []}, None, "rates"),
        ({"rates": [0.75, 0.5]}, None, "ascending"),
        ({"rates": [0.5, 1.5]}, None, "between 0 and 1"),
        ({"rates": "all"}, None, "ascending"),
        ({"model_fingerprint": 3}, None, "fingerprint"),
        ({}, (5, 64), "expected finite numbers"),
        ({}, (75,), "expected finite numbers"),
    ],
)
def test_other_files_are_refused(
    tmp_path: Path, header: dict[str, Any] | None, shape: tuple[int, ...] | None, message: str
) -> None:
    path = tmp_path / FILE_NAME
    fields = {"version": 1, "rates": [0.5, 0.75], "model_fingerprint": "f"}
    metadata = None if header is None else {"kvrag-anchors": json.dumps({**fields, **header})}
    save_file({"embeddings": torch.zeros(shape or (75, 64))}, str(path), metadata=metadata)
    with pytest.raises(AnchorsError, match=message):
        Anchors.load(path)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float8_e4m3fn])
def test_other_types_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    fields = {"version": 1, "rates": [0.5, 0.75], "model_fingerprint": "f"}
    table = torch.full((75, 64), float("nan")).to(dtype)
    path = tmp_path / FILE_NAME
    save_file({"embeddings": table}, str(path), metadata={"kvrag-anchors": json.dumps(fields)})
    with pytest.raises(AnchorsError, match="expected finite numbers"):
        Anchors.load(path)


def test_damaged_and_absent_files_are_refused(tmp_path: Path, model: KVModel) -> None:
    path = tmp_path / FILE_NAME
    with pytest.raises(AnchorsError, match="no anchors at"):
        Anchors.load(path)
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(AnchorsError, match="not a readable file"):
        Anchors.load(path)
    with pytest.raises(AnchorsError, match="not loaded from a folder"):
        find_anchors(model)


def test_anchors_of_another_model_rate_or_width_are_refused(model: KVModel) -> None:
    half = Compression("anchors", 0.5)
    anchors = make_anchors(model)
    Compressor(model, half, anchors)
    with pytest.raises(AnchorsError, match="anchors of another model"):
        Compressor(model, half, replace(anchors, model_fingerprint="other"))
    with pytest.raises(AnchorsError, match=r"trained for anchors:0\.5, anchors:0\.75"):
        Compressor(model, Compression("anchors", 0.6), anchors)
    narrow = replace(anchors, embeddings=anchors.embeddings[:, :32])
    with pytest.raises(AnchorsError, match="width 32, expected 64"):
        Compressor(model, half, narrow)


def test_keys_name_compression_and_anchors(model: KVModel) -> None:
    half = Compression("anchors", 0.5)
    anchors = make_anchors(model)
    other = replace(anchors, embeddings=anchors.embeddings + 1)
    options = [
        Compressor(model, half, anchors).key_options,
        Compressor(model, half, other).key_options,
        Compressor(model, Compression("anchors", 0.75), anchors).key_options,
        Compressor(model, Compression("drop", 0.5)).key_options,
    ]
    assert len({tuple(sorted(one.items())) for one in options}) == 4
