import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvrag.kvcache import ChunkKV, KVSpec
from kvrag.native.kernels import instruction_set, instruction_sets
from kvrag_bench.codec import contenders
from kvrag_bench.codec.baselines import (
    CACHEGEN_PUBLIC,
    measure_cachegen,
    measure_eight_bit,
    public_bins,
)
from kvrag_bench.codec.options import MINILM, CodecBenchOptions
from kvrag_bench.codec.presets import preset_rows
from kvrag_bench.codec.rows import BASELINE, CODER, EQUAL, PRESET
from kvrag_bench.codec.sources import Source, make_source
from kvrag_bench.codec.speed import speed_rows

ROOT = Path(__file__).parents[2]
SMALL = CodecBenchOptions(
    chunk_tokens=(40,),
    fit_tokens=600,
    test_tokens=80,
    codecs=("raw", "lossless", "cachegen:2", "transform:0.5", "transform:0.2"),
    shape="test",
    decode_codecs=("transform:1", "lossless", "raw"),
    group_layers=(1, 0),
    context_chunks=2,
    context_tokens=30,
    symbol_rows=20,
    symbol_tokens=32,
    repeats=1,
)


def correlated(spec: KVSpec, num_tokens: int, seed: int) -> ChunkKV:
    """Return KV that a few directions nearly describe, as real KV is."""
    draw = torch.Generator().manual_seed(seed)
    width = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim
    basis = torch.randn(6, width, generator=torch.Generator().manual_seed(0))
    rows = torch.randn(num_tokens, 6, generator=draw) @ basis
    rows += 0.05 * torch.randn(num_tokens, width, generator=draw) + 1.0
    shape = (num_tokens, 2, spec.num_layers, spec.num_kv_heads, spec.head_dim)
    keys, values = rows.view(shape).permute(1, 2, 3, 0, 4).contiguous()
    return ChunkKV(keys, values)


@pytest.fixture(scope="module")
def source() -> Source:
    spec = KVSpec(3, 2, 8, torch.float32)
    fit = [correlated(spec, 60, seed) for seed in range(12)]
    return Source("made up", spec, fit, {50: [correlated(spec, 50, 100)]})


def test_rates_and_errors_of_presets_and_baselines(source: Source) -> None:
    rows = list(preset_rows(source, ("raw", "lossless", "transform:1", "transform:0.5")))
    by_name = {row.name: row for row in rows if row.part == PRESET}
    assert list(by_name) == [
        "raw",
        "lossless",
        *(f"transform:{bits}{cut}" for bits in ("1", "0.5") for cut in ("/1", "/2", "")),
    ]
    raw = by_name["raw"]
    assert raw.bits_per_element > 32.0  # the header is counted
    assert raw.relative_error == 0.0
    assert raw.entropy_bits is None
    assert by_name["lossless"].relative_error == 0.0
    whole, cut = by_name["transform:1"], by_name["transform:1/1"]
    assert cut.bits_per_element < whole.bits_per_element
    assert whole.relative_error < cut.relative_error
    for row in rows:
        if row.entropy_bits is not None:
            assert row.entropy_bits < row.bits_per_element
    # 2 scales of 16 bits for each layer's 16 keys and 16 values.
    eight = next(row for row in rows if row.preset == "8-bit" and row.part == BASELINE)
    assert eight.bits_per_element == 9.0


def test_the_public_scheme_is_counted_by_hand() -> None:
    assert public_bins(6, 0) == [32, 32, 16, 16, 16, 16]
    assert public_bins(6, 1) == [32, 16, 16, 16, 16, 16]
    spec = KVSpec(1, 1, 2, torch.float32)
    # One channel sets the scale and stays at 7, the other is 7 or -7 in turn.
    channel = torch.tensor([1.0, -1.0] * 8)
    tensor = torch.stack([torch.ones(16), channel], dim=1)[None, None]
    source = Source("one", spec, [ChunkKV(tensor, tensor)], {16: []})
    point = measure_cachegen(source, [ChunkKV(tensor, tensor)], 1.0, same_bins=True)
    assert point.error < 1e-6
    assert point.entropy == pytest.approx(0.5)  # one bit in every second channel
    tables, scales = (1 + 15) * 8, 16 * 16  # least to greatest symbol; 16 tokens
    assert point.bits == pytest.approx(0.5 + (tables + scales) / 32)
    eight = measure_eight_bit(source, [ChunkKV(tensor, tensor)])
    assert eight.bits == 8 + 16 / 2


def test_smaller_than_the_public_scheme_at_equal_distortion(source: Source) -> None:
    rows = preset_rows(source, ("transform:0.3", "transform:0.1", "transform:0.05"))
    equal = [row for row in rows if row.part == EQUAL and row.baseline == CACHEGEN_PUBLIC]
    assert equal
    assert all(row.ratio is not None and row.ratio > 2.5 for row in equal)


@pytest.mark.slow
def test_entropy_coders_take_turns(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    # What is timed is long enough for a figure that means something; here it means nothing.
    monkeypatch.setattr(contenders, "_LEAST_SYMBOLS", 10_000)
    rows = list(speed_rows(SMALL, source))
    assert {row.preset for row in rows} == {"kvrag", "constriction", "numba"}
    assert {row.threads for row in rows if row.preset == "kvrag"} == {1, 2}
    assert instruction_set() == instruction_sets()[-1]
    for row in rows:
        assert row.part == CODER
        assert row.decode_symbols_per_second is not None
        assert row.entropy_bits < row.bits_per_element


def test_the_two_parts_of_a_data_set_share_no_text(tmp_path: Path) -> None:
    words = ["river", "bank", "keeper", "light", "harbour", "ledger", "clock", "tower", "boat"]
    texts = [" ".join(words[i % 9 :] + words[: i % 9]) * 9 + f" {i}" for i in range(12)]
    asked = {"question": "Who?", "answers": ["none"], "ctxs": [{"text": text} for text in texts]}
    data = tmp_path / "texts.json"
    data.write_text(json.dumps([asked]))
    options = replace(SMALL, sources=(MINILM,), data=str(data), fit_tokens=200, test_tokens=40)
    source = make_source(MINILM, options)
    (measured,) = source.measured[40]
    assert measured.num_tokens == 40
    assert not any(torch.allclose(measured.keys, kv.keys, atol=1e-4) for kv in source.fit)
