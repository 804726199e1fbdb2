"""GGUF files whose matrices stay in their bits: taken apart, laid out, loaded and computed."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from kvrag.engine.engine import KVEngine
from kvrag.errors import ModelLoadError, ParameterError
from kvrag.fusion.fuser import fuse
from kvrag.fusion.layout import Layout
from kvrag.fusion.policies.base import NonePolicy
from kvrag.fusion.policies.deviation import DeviationPolicy
from kvrag.fusion.report import FusionReport
from kvrag.ingest.index import Index
from kvrag.kvcache import FusedKV
from kvrag.models.compute import resolved_compute
from kvrag.models.kv_model import KVModel
from kvrag.models.loading import model_fingerprint
from kvrag.models.pretrained import load_weights
from kvrag.models.references import resolve_model
from kvrag.models.small import SmallEmbedding, SmallLinear, small_layers
from kvrag.native.kernels import IS_COMPILED
from kvrag.native.linear import GroupedWeight
from kvrag.weights.architectures import Metadata
from kvrag.weights.packing import (
    KINDS,
    _Kept,
    _pack,
    _safetensors,
    greatest,
    plan,
    take_apart,
)
from kvrag_bench.floor import FloorMeter
from kvrag_testing.bench_top import Bench, relative_difference
from tests.support.gguf_files import random_blocks, write_gguf
from tools import large_gguf

pytestmark = pytest.mark.skipif(not IS_COMPILED, reason="kernels compute with them")


def written(path: Path, folder: Path, *, is_small: bool = True) -> Path:
    """Convert a file in this process, without a tokenizer."""
    planned = plan(Metadata(path, gguf.GGUFReader(str(path))), is_small=is_small)
    folder.mkdir()
    planned.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, KVModel]:
    """A GGUF file, and its model."""
    folder = tmp_path_factory.mktemp("gguf")
    write_gguf(folder / "m.gguf", kind="Q4_1")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("KVRAG_MODELS", str(folder / "cache"))
        return folder / "m.gguf", KVModel.load(folder / "m.gguf")


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_what_gguf_says(kind: str) -> None:
    rows = random_blocks(kind, 3, 4)
    parts = take_apart(kind, rows)
    expected = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind])
    assert np.array_equal(parts.values(), expected)
    assert int(parts.numbers.max()) < 2**parts.bits
    top = max(np.abs(part).max() for part in (parts.scale, parts.least) if part is not None)
    assert top <= greatest(kind, rows)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
@torch.no_grad()
def test_a_model_in_its_bits_is_the_one_in_16(kind: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", kind=kind)
    hf = load_weights(written(tmp_path / "m.gguf", tmp_path / "small"), None, None)
    layers = small_layers(hf)
    assert len(layers) == 2 * 7 + 2
    assert isinstance(layers["model.embed_tokens"], SmallEmbedding)
    # Tied: one copy.
    assert layers["lm_head"].weight is layers["model.embed_tokens"].weight
    folder = written(tmp_path / "m.gguf", tmp_path / "whole", is_small=False)
    whole = load_weights(folder, None, None)
    assert not small_layers(whole)
    assert model_fingerprint(hf) == model_fingerprint(whole)
    for name, layer in layers.items():
        expected = whole.get_submodule(name).weight
        assert torch.equal(layer.numbers(torch.bfloat16), expected)
    ids = torch.arange(3, 40)[None]
    found, expected = hf(ids).logits.float(), whole.float()(ids).logits
    assert (found - expected).norm() < 0.06 * expected.norm()
    widened = hf.float()(ids).logits
    assert widened.dtype == torch.float32
    assert (widened - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize("scale", [np.inf, np.nan])
def test_blocks_whose_scale_is_no_number_are_refused(scale: float, tmp_path: Path) -> None:
    """Kernels would clamp it, and compute something else than the file says."""
    path = tmp_path / "m.gguf"
    write_gguf(path, kind="Q4_1")
    reader = gguf.GGUFReader(str(path), "r+")
    rows = next(one.data for one in reader.tensors if one.name == "blk.0.ffn_up.weight")
    rows[3, 2:4] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
    reader.data.flush()
    for is_small in (True, False):
        with pytest.raises(ModelLoadError, match=r"blk.0.ffn_up.weight with NaN or infinity"):
            plan(Metadata(path, gguf.GGUFReader(str(path))), is_small=is_small)


def test_the_room_of_weights_is_taken_before_they_are_written(tmp_path: Path) -> None:
    """Or a full disk would end the process by a signal, which says nothing of disks."""
    _safetensors(tmp_path / "a", {"a": ("BF16", [1 << 20])})
    assert (tmp_path / "a").stat().st_blocks * 512 >= 2 << 20


def test_all_computed_again_is_the_same_engines_prefill(small: tuple[Path, KVModel]) -> None:
    """By modules and by compiled layers, bit for bit."""
    _, model = small
    assert isinstance(model.hf.model.layers[0].mlp.up_proj, SmallLinear)
    assert model.compile() is not None
    bench = Bench(model)
    prompt = "Context:\n" + bench.prompt(2, 0, 3, 1)
    fused = bench.fuse(prompt, DeviationPolicy(ratio=1.0))
    assert fused.report.num_exact == 0
    plain = Bench(model, texts=()).fuse(prompt, DeviationPolicy(ratio=1.0))
    assert plain.report.num_fresh == plain.report.num_tokens
    assert torch.equal(fused.logits, plain.logits)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("kvrag.models.kv_model.compile_layers", lambda *_, **__: None)
        by_modules = Bench(model).fuse(prompt, DeviationPolicy(ratio=1.0))
    assert relative_difference(fused.logits, by_modules.logits) < 0.3


def test_an_index_over_such_a_model_answers(small: tuple[Path, KVModel], tmp_path: Path) -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 20
    (tmp_path / "a.txt").write_text(text)
    with Index.create(tmp_path / "index", model=small[1], codec="raw", chunk_tokens=64) as index:
        index.add([tmp_path / "a.txt"])
        answer = KVEngine(index).generate(f"{text}\n\nWhich animal jumps?", max_tokens=4)
    assert answer.report.num_chunks
    assert answer.usage.completion_tokens


def test_the_floor_of_a_bench_multiplies_by_such_weights(small: tuple[Path, KVModel]) -> None:
    report = FusionReport("none", 8, 0, 0, 0, 8, 0, 10**6, {}, (8,) * small[1].spec.num_layers)
    assert FloorMeter(small[1]).measure(report).matrix_seconds > 0


def test_gradients_go_through_the_numbers(small: tuple[Path, KVModel]) -> None:
    layer = small[1].hf.model.layers[0].mlp.up_proj
    rows = torch.randn(3, layer.in_features, requires_grad=True)
    layer(rows).sum().backward()
    expected = layer.numbers(torch.float32).sum(0).expand(3, -1)
    assert torch.allclose(rows.grad, expected, atol=1e-5)


def test_another_precision_takes_the_weights_in_16_bits(
    small: tuple[Path, KVModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, model = small
    monkeypatch.setenv("KVRAG_MODELS", str(path.parent / "cache"))
    whole = KVModel.load(path, compute="int8")
    assert not small_layers(whole.hf)
    assert whole.fingerprint == model.fingerprint
    assert {"-small" in entry.name for entry in (path.parent / "cache").glob("[!.]*")} == {
        True,
        False,
    }
    with pytest.raises(ParameterError, match="stay in a GGUF file's bits"):
        resolved_compute(model.hf, "int8")


def test_types_that_kernels_do_not_know_become_16_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_gguf(tmp_path / "m.gguf", kind="F16")
    monkeypatch.setenv("KVRAG_MODELS", str(tmp_path / "cache"))
    with caplog.at_level("INFO"):
        folder = Path(resolve_model(tmp_path / "m.gguf", is_small=True))
    assert "no matrix of it can stay in its bits, so all are in 16" in caplog.text
    assert "quantization_config" not in (folder / "config.json").read_text()


def test_it_is_not_saved_as_if_it_were_numbers(small: tuple[Path, KVModel], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not serializable"):
        small[1].hf.save_pretrained(tmp_path)


def test_damaged_weights_are_told(small: tuple[Path, KVModel], tmp_path: Path) -> None:
    """Their fingerprint is that of the file that they were made from, and would fit an index."""
    folder = written(small[0], tmp_path / "small")
    model_fingerprint(load_weights(folder, None, None))
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-100, 2)
        byte = file.read(1)[0]
        file.seek(-100, 2)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(ModelLoadError, match=r"damaged.*kvrag models rm NAME"):
        model_fingerprint(load_weights(folder, None, None))


def test_another_version_of_the_layout_is_refused(
    small: tuple[Path, KVModel], tmp_path: Path
) -> None:
    folder = written(small[0], tmp_path / "small")
    fields = json.loads((folder / "config.json").read_text())
    fields["quantization_config"]["version"] = 99
    (folder / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ModelLoadError, match=r"^this GGUF.*another version of kvrag \(format 99"):
        load_weights(folder, None, None)


def test_the_file_of_the_large_bench_is_converted_and_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"HIDDEN": 256, "INNER": 512, "HEADS": 4, "KV_HEADS": 2, "VOCABULARY": 512}
    for name, size in sizes.items():
        monkeypatch.setattr(large_gguf, name, size)
    large_gguf.write(tmp_path / "large.gguf", 2)
    monkeypatch.setenv("KVRAG_MODELS", str(tmp_path / "models"))
    model = KVModel.load(tmp_path / "large.gguf")
    assert len(small_layers(model.decoder)) == 2 * 7 + 2
    fused = fuse(
        model,
        Layout(tuple(range(40, 72)), (), 0, True, {}),
        lambda *_: None,
        NonePolicy(),
        FusedKV(model.spec, 32, 33),
    )
    assert fused.logits.isfinite().all()
    assert fused.logits.std() > 0


def test_rows_of_k_blocks_are_laid_out_and_put_in_order() -> None:
    """Queries' rows in the order of Transformers, all types that have no Python to write them."""
    order = np.random.default_rng(1).permutation(70)
    for kind in ("Q4_K", "Q5_K", "Q6_K"):
        rows = random_blocks(kind, 70, 2)
        one = _Kept(kind, rows, order)
        taken = take_apart(kind, rows)
        has_least = taken.least is not None
        factor = GroupedWeight.factor_of(greatest(kind, rows))
        place = np.zeros(sum(GroupedWeight.sizes(taken.bits, one.shape, has_least)), np.uint8)
        _pack(one, place, factor)
        laid = GroupedWeight.of(torch.from_numpy(place), taken.bits, one.shape, has_least, factor)
        found = laid.rows(torch.arange(70), torch.float32).numpy()
        expected = taken.values()[order]
        # Scales are rounded to 11 bits.
        assert np.abs(found - expected).max() <= 2**-10 * np.abs(expected).max()
