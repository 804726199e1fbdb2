"""A writer: an adapter that acts while chunks are encoded after other text, and nowhere else."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvrag.chunk import Document
from kvrag.engine.engine import KVEngine
from kvrag.errors import IndexFormatError, LinksError, ParameterError
from kvrag.fusion.links import WRITER, LinksHeader, LinkTokens
from kvrag.ingest.coding import read_all
from kvrag.ingest.encoders import Encoders
from kvrag.ingest.index import Index
from kvrag.ingest.profiles import read_writer
from kvrag.llms.vllm.plan import TokenFinder
from kvrag.models.adapter import RowAdapter, linear_layers
from kvrag.models.kv_model import KVModel
from tests.ingest.conftest import MakeIndex, stored_bytes
from tests.support.models import HEAD

TEXTS = {
    "ledger": "Ines keeps the harbour ledger of Varn, by the old river bank near the light.",
    "clock": "Tomas repairs the tall clock, and he said that the lazy dog jumps over it.",
}
PROMPT = HEAD + "\n\n".join([*TEXTS.values(), "Question: who keeps the ledger?\nAnswer:"])
FILLER = "filler:40"


def writer_of(model: KVModel, fingerprint: str | None = None) -> LinkTokens:
    drawn = torch.Generator().manual_seed(0)
    layers = linear_layers(model.decoder).items()
    down = {name: torch.randn(4, one.in_features, generator=drawn) for name, one in layers}
    up = {name: torch.randn(one.out_features, 4, generator=drawn) * 0.02 for name, one in layers}
    header = LinksHeader("frozen", WRITER, 0, 0, fingerprint or model.fingerprint, 1.0)
    return LinkTokens(header, None, RowAdapter(down, up, 1.0))


@pytest.fixture
def file(tmp_path: Path, model: KVModel) -> Path:
    writer_of(model).save(tmp_path / "writer.safetensors")
    return tmp_path / "writer.safetensors"


@pytest.fixture
def index(make_index: MakeIndex, file: Path) -> Index:
    index = make_index(context=FILLER, writer=file)
    index.add([Document(name, text) for name, text in TEXTS.items()])
    return index


def test_it_acts_on_what_is_encoded_after_a_context(
    index: Index, make_index: MakeIndex, model: KVModel, file: Path, tmp_path: Path
) -> None:
    plain = make_index("plain", context=FILLER)
    plain.add([Document(name, text) for name, text in TEXTS.items()])
    adapter = LinkTokens.load(file, is_writer=True).adapter
    for name in TEXTS:
        (chunk_id,) = index.catalog.chunk_ids_of(name)
        (chunk,) = index.get_chunks([chunk_id])
        before = (*index.prefix_ids, *chunk.contexts[0])
        found = read_all(index.open_kv(chunk_id), index.config.spec)
        (expected,) = model.prefill(before, [chunk.token_ids], adapter=adapter)
        torch.testing.assert_close(found.keys, expected.keys, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found.values, expected.values, rtol=1e-4, atol=1e-5)
        other = read_all(plain.open_kv(chunk_id), index.config.spec)
        assert not torch.allclose(found.values, other.values, rtol=1e-2, atol=1e-3)
        # Another record than that of an index without it; alone, the same.
        written, alone = chunk.encodings()
        assert index.key_of(written) != plain.key_of(written)
        assert index.key_of(alone) == plain.key_of(alone)
        # As on a machine of a cluster, which has no index folder.
        remote = Encoders(
            tmp_path / "elsewhere", index.config, model=model, embedding=None, device=None
        )
        remote.writer = read_writer(file)[0]
        assert torch.equal(remote.prefill(written).values, found.values)


def test_what_is_computed_for_a_prompt_stays_the_models_own(index: Index, model: KVModel) -> None:
    whole = KVEngine(index, policy="deviation", ratio=1.0).fuse(PROMPT)
    ids = torch.tensor([whole.layout.token_ids])
    plain = model.hf(ids).logits[0, -1]
    torch.testing.assert_close(whole.logits, plain, rtol=1e-4, atol=1e-4)
    index.on_demand.flush()
    first, second = KVEngine(index, policy="none").fuse(PROMPT).layout.spans
    kv = read_all(index.open_kv(first.chunk_id, ()), index.config.spec)
    (chunk,) = index.get_chunks([first.chunk_id])
    (alone,) = model.prefill(index.prefix_ids, [chunk.token_ids])
    torch.testing.assert_close(kv.values, alone.values, rtol=1e-4, atol=1e-5)
    assert second.context_ids


def test_a_record_after_its_own_context_is_not_exact(
    index: Index, make_index: MakeIndex, model: KVModel
) -> None:
    plain = make_index("plain", context=FILLER)
    plain.add([Document(name, text) for name, text in TEXTS.items()])
    for one, is_exact in ((index, False), (plain, True)):
        layout = KVEngine(one, policy="none").fuse(PROMPT).layout
        span = layout.spans[1]
        standing = replace(layout, token_ids=(*index.prefix_ids, *span.context_ids, 1, 2))
        at = replace(span, prompt_start=len(standing.token_ids) - 2)
        assert standing.is_exact(at) is is_exact
        assert TokenFinder(one).find(layout.token_ids).has_writer is layout.has_writer


def test_a_lost_record_is_made_again_and_gc_keeps_the_writer(index: Index, model: KVModel) -> None:
    before = stored_bytes(index)
    for key in list(index.store.keys()):
        index.store.delete(key)
    assert index.upkeep.verify(repair=True).num_repaired == len(TEXTS)
    assert stored_bytes(index) == before
    index.upkeep.gc()
    assert index.stats().writer == index.config.writer != ""
    index.close()
    with Index.open(index.path, model=model) as again:
        assert stored_bytes(again) == before


def test_a_shared_index_carries_it(folder_url: str, machine, file: Path) -> None:  # type: ignore[no-untyped-def]
    made = machine("one", folder_url, context=FILLER, writer=file)
    made.add([Document("ledger", TEXTS["ledger"])])
    other = machine("two", folder_url)
    other.add([Document("clock", TEXTS["clock"])])
    assert other.upkeep.verify().ok
    assert len(list(other.store.keys())) == len(TEXTS)


def test_a_missing_or_damaged_writer_is_an_error_at_opening(index: Index, model: KVModel) -> None:
    (kept,) = (index.path / "profiles").glob(f"{index.config.writer}*")
    index.close()
    content = kept.read_bytes()
    kept.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(IndexFormatError, match="the writer of this index, is damaged"):
        Index.open(index.path, model=model)
    kept.unlink()
    with pytest.raises(IndexFormatError, match="the writer of this index, cannot be read"):
        Index.open(index.path, model=model)


def test_what_is_no_writer_of_the_model_is_refused(
    make_index: MakeIndex, model: KVModel, file: Path, tmp_path: Path
) -> None:
    foreign = tmp_path / "foreign.safetensors"
    writer_of(model, "0" * 40).save(foreign)
    links = tmp_path / "links.safetensors"
    header = LinksHeader("frozen", "embeddings", 1, 1, model.fingerprint)
    LinkTokens(header, torch.zeros(header.num_rows, model.decoder.config.hidden_size)).save(links)
    for number, (given, context, kind, what) in enumerate(
        [
            (foreign, FILLER, LinksError, "writer of another model"),
            (links, FILLER, LinksError, "where a writer is expected"),
            (tmp_path / "none", FILLER, ParameterError, "cannot be read"),
            (file, "none", ParameterError, "it would do nothing"),
            (file, "document", ParameterError, "choose similar or filler"),
        ]
    ):
        with pytest.raises(kind, match=what):
            make_index(f"refused {number}", context=context, writer=given)
    with pytest.raises(LinksError, match="a writer, where links are expected"):
        LinkTokens.load(file)
