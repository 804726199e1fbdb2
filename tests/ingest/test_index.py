"""An index from making to answering: incremental, shared records, search, upkeep of rows."""

import json
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvrag.chunk import Document
from kvrag.errors import DocumentError, IndexMismatchError, ParameterError
from kvrag.fusion.segments import ChunkMatcher
from kvrag.ingest.index import Index
from kvrag.ingest.limits import ParseLimits
from kvrag.ingest.ray.driver import RayOptions
from kvrag.ingest.report import IngestProgress
from kvrag.ingest.settings import IndexSettings
from kvrag.models.kv_model import KVModel
from kvrag.optiontable import options_of, text_of
from tests.ingest.conftest import MakeIndex
from tests.ingest.test_embedding import Sided


def names(sources: tuple[str, ...]) -> set[str]:
    return {Path(source).name for source in sources}


def test_a_folder_is_indexed_and_found(index: Index, docs: Path, model: KVModel) -> None:
    report = index.add(docs)
    assert names(report.added) == {"ledger.txt", "clock.md", "fox.txt"}
    assert report.ok
    assert report.num_chunks == report.num_records == 3
    assert report.num_tokens == report.num_tokens_computed
    assert report.size_bytes == index.stats().size_bytes
    best = index.search("Who repairs the tall clock?", 2)
    assert Path(best[0].chunk.source).name == "clock.md"
    assert best[0].score >= best[1].score
    assert best[0].chunk.metadata == {"heading": "The clock", "headings": ["The clock"]}
    assert index.get_chunks([best[1].chunk.chunk_id, "absent", best[0].chunk.chunk_id]) == [
        best[1].chunk,
        best[0].chunk,
    ]
    assert index.recent_chunk_ids == tuple(hit.chunk.chunk_id for hit in best)


def test_unchanged_files_cost_no_model_time(
    index: Index, docs: Path, model: KVModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A change time may be recorded at once: on a busy machine, a later run would record it.
    monkeypatch.setattr("kvrag.ingest.plan._TICK_NS", 0)
    first = index.add(docs)
    monkeypatch.setattr(KVModel, "prefill", None)
    monkeypatch.setattr(type(index.embedding), "embed", lambda self, texts: np.zeros((0, 1024)))
    assert names(index.add(docs).unchanged) == names(first.added)
    os.utime(docs / "ledger.txt", ns=(1, 1))  # content decides, not time
    generation = index.catalog.version()[0]
    again = index.add(docs)
    assert names(again.unchanged) == names(first.added)
    assert not again.added
    assert not again.changed
    assert again.num_tokens_computed == 0
    assert index.catalog.version()[0] == generation + 1
    index.add(docs)
    assert index.catalog.version()[0] == generation + 1  # the new time was noted


def test_changed_and_deleted_files_are_replaced_and_collected(index: Index, docs: Path) -> None:
    index.add(docs)
    (docs / "clock.md").write_text("Nobody repairs the clock now; it stands still.")
    (docs / "deep" / "fox.txt").unlink()
    (docs / "new.txt").write_text("A new page.")
    report = index.add(docs)
    assert names(report.changed) == {"clock.md"}
    assert names(report.removed) == {"fox.txt"}
    assert names(report.added) == {"new.txt"}
    assert names(report.unchanged) == {"ledger.txt"}
    assert report.num_records == 2
    assert "stands still" in index.search("clock repairs", 1)[0].chunk.text
    assert {Path(row.source).name for row in index.documents()} == {
        "clock.md",
        "new.txt",
        "ledger.txt",
    }
    before = index.stats()
    assert before.num_unreferenced_records == 2
    collected = index.upkeep.gc()
    assert collected.num_records == 2
    after = index.stats()
    assert collected.size_bytes == before.size_bytes - after.size_bytes
    assert after.num_unreferenced_records == 0
    assert index.upkeep.verify().ok


def test_files_elsewhere_are_not_taken_for_deleted(index: Index, docs: Path) -> None:
    index.add(docs)
    other = docs.with_name("docs2")
    other.mkdir()
    (other / "x.txt").write_text("another folder")
    assert not index.add(other).removed
    assert not index.add(docs / "ledger.txt").removed
    (docs / "deep" / "fox.txt").unlink()
    assert not index.add(docs / "clock.md").removed
    assert names(index.add(docs).removed) == {"fox.txt"}


def test_rows_of_a_table_change_one_by_one(index: Index, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(f"row number {i}") for i in range(4)))
    assert len(index.add(path).added) == 4
    path.write_text("\n".join(json.dumps(f"row number {i}") for i in (0, 9, 2)))
    report = index.add(path)
    assert names(report.unchanged) == {"rows.jsonl#1", "rows.jsonl#3"}
    assert names(report.changed) == {"rows.jsonl#2"}
    assert names(report.removed) == {"rows.jsonl#4"}
    path.write_text("\n".join(json.dumps(f"row number {i}") for i in (0, 9)))
    assert names(index.add(path).removed) == {"rows.jsonl#3"}
    assert len(index.add(path).unchanged) == 2


def test_documents_with_the_same_tokens_share_one_record(index: Index) -> None:
    report = index.add([Document("a", "the same text"), Document("b", " the same text\n")])
    assert (report.num_chunks, report.num_records) == (2, 1)
    assert index.stats().num_records == 1
    assert index.add(Document("c", "the same text")).num_records == 0
    assert index.delete(sources=["a"]) == 1
    assert index.upkeep.gc().num_records == 0
    assert len(index.search("same", 4)) == 2


def test_a_text_of_several_documents_is_embedded_once(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedded: list[str] = []
    embed = type(index.embedding).embed

    def note(self: Any, texts: list[str]) -> Any:
        embedded.extend(texts)
        return embed(self, texts)

    monkeypatch.setattr(type(index.embedding), "embed", note)
    index.add([Document(name, text) for name, text in (("a", "one"), ("b", "two"), ("c", "one"))])
    assert embedded == ["one", "two"]
    assert {hit.chunk.source for hit in index.search("one", 2)} == {"a", "c"}


def test_a_document_of_a_known_source_replaces_it(index: Index) -> None:
    index.add([Document("a", "first"), Document("a", "second"), Document("b", "third")])
    assert {hit.chunk.text for hit in index.search("x", 9)} == {"second", "third"}
    report = index.add([Document("a", "second", {"lang": "en"}), Document("b", "third")])
    assert (report.changed, report.unchanged, report.num_records) == (("a",), ("b",), 0)
    assert index.search("second", 1)[0].chunk.metadata == {"lang": "en"}


def test_everything_that_can_be_added_at_once(index: Index, docs: Path) -> None:
    documents = pytest.importorskip("langchain_core.documents")
    schema = pytest.importorskip("llama_index.core.schema")
    given = (
        value
        for value in (
            str(docs),
            docs / "clock.md",
            Document("own", "an own document"),
            [documents.Document(page_content="a page", id="lc")],
            schema.TextNode(text="a node", id_="li"),
        )
    )
    report = index.add(given)
    assert names(report.added) == {"ledger.txt", "clock.md", "fox.txt", "own", "lc", "li"}


def test_a_dry_run_writes_nothing_and_foretells(index: Index, docs: Path) -> None:
    foretold = index.add(docs, dry_run=True)
    assert foretold.dry_run
    assert index.stats().num_documents == index.stats().num_records == 0
    report = index.add(docs)
    assert foretold.added == report.added
    for name in ("num_chunks", "num_tokens", "num_records", "num_tokens_computed"):
        assert getattr(foretold, name) == getattr(report, name)
    estimate = report.num_tokens * index.config.expected_bytes_per_token
    assert foretold.size_bytes == estimate <= report.size_bytes


def test_documents_too_many_to_keep_are_cut_again(
    index: Index, docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Progress reaches the end without what fails when it is read again."""
    monkeypatch.setattr("kvrag.ingest.plan._MAX_KEPT_TOKENS", -1)
    monkeypatch.setattr("kvrag.ingest.stages.COMMIT_TOKENS", 8)
    seen: list[IngestProgress] = []

    def note(progress: IngestProgress) -> None:
        seen.append(progress)
        if progress.stage == "read" and progress.num_documents_done == 4:
            (docs / "ledger.txt").write_text("changed after it was planned")

    report = index.add([docs, Document("own", "an own document")], on_progress=note)
    assert names(report.added) == {"clock.md", "fox.txt", "own"}
    assert "changed while it was being ingested" in report.failed[0].reason
    assert [one.num_documents_done for one in seen if one.stage == "read"] == [1, 2, 3, 4]
    last = [one for one in seen if one.stage == "compute"][-1]
    assert last.num_documents_done == last.num_documents == 4
    assert last.num_tokens_done == last.num_tokens == report.num_tokens_computed
    assert last.eta_seconds == 0.0 < last.tokens_per_second
    assert last.size_bytes_done == report.size_bytes
    json.dumps(last.to_dict())
    assert names(index.add(docs).added) == {"ledger.txt"}


def test_single_chunks_and_sources_are_deleted(index: Index, docs: Path) -> None:
    path = docs / "long.txt"
    path.write_text("The keeper of the northern light wrote the book. " * 12)
    index.add(docs)
    (row,) = [row for row in index.documents() if row.source == str(path)]
    chunk_ids = index.catalog.chunk_ids_of(str(path))
    assert row.num_chunks == len(chunk_ids) > 1
    assert index.delete(chunk_ids=[chunk_ids[0], "absent"]) == 1
    assert index.get_chunks(chunk_ids) == index.get_chunks(chunk_ids[1:])
    assert index.matcher.find(path.read_text()) is not None
    # What is left of it is not what the file says, so adding it again mends it.
    assert names(index.add(docs).changed) == {"long.txt"}
    assert len(index.get_chunks(chunk_ids)) == len(chunk_ids)
    assert index.delete(sources=[str(path), "absent"]) == len(chunk_ids)
    assert names(index.add(docs).added) == {"long.txt"}
    index.delete(chunk_ids=index.catalog.chunk_ids_of(str(docs / "clock.md")))
    assert "clock.md" not in {Path(row.source).name for row in index.documents()}


def test_a_change_by_another_costs_the_matcher_only_what_changed(
    index: Index, docs: Path, model: KVModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.add(docs)
    clock = (docs / "clock.md").read_text()
    first = index.matcher
    assert first.find(clock)
    added: list[str] = []
    real = ChunkMatcher.add
    monkeypatch.setattr(
        ChunkMatcher, "add", lambda self, one, text: added.append(text) or real(self, one, text)
    )
    (docs / "clock.md").unlink()
    text = "Vera rows the ferry across the wide bay of Varn."
    with Index.open(index.path, model=model) as writer:
        writer.add([docs, Document("ferry", text)])
    assert index.matcher.find(f"> {text} Question")
    assert added == [text]
    assert not index.matcher.find(clock)
    assert index.matcher.find("The quick brown fox jumps over the lazy dog.")
    # Whoever searches with the old one is not disturbed.
    assert not first.find(text)
    assert set(first) != set(index.matcher)
    assert (len(first), len(index.matcher)) == (3, 3)


def test_the_vectors_cache_is_only_a_cache(index: Index, docs: Path, model: KVModel) -> None:
    index.add(docs)
    expected = index.search("the harbour", 3)
    cache = index.path / "vectors.cache"
    good = cache.read_bytes()
    flipped = bytearray(good)
    flipped[-1] ^= 1
    for content in (good, b"", good[:-4], bytes(flipped), b"\0" * len(good)):
        cache.write_bytes(content)
        with Index.open(index.path, model=model) as opened:
            assert opened.search("the harbour", 3) == expected
        assert cache.read_bytes() == good
    cache.unlink()
    with Index.open(index.path, model=model) as opened:
        assert opened.search("the harbour", 3) == expected


def test_an_index_opens_without_weights(
    tmp_path: Path, docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.support.rag import save_model

    save_model(tmp_path / "model")
    with Index.create(tmp_path / "i", model=tmp_path / "model", embedding="hashing") as index:
        index.add(docs)
    assert index.config.model == str((tmp_path / "model").resolve())
    monkeypatch.setattr(KVModel, "load", None)
    with Index.open(tmp_path / "i") as opened:
        (hit, *_) = opened.search("clock", 1)
        assert opened.open_kv(hit.chunk.chunk_id) is not None
        assert opened.add(docs, dry_run=True).unchanged
        assert opened.tokenizer(hit.chunk.text, add_special_tokens=False)["input_ids"] == list(
            hit.chunk.token_ids
        )
        assert opened.upkeep.verify().ok
        assert opened.stats().num_documents == 3


def test_the_device_reaches_the_model(
    tmp_path: Path, model: KVModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.support.rag import save_model

    save_model(tmp_path / "model")
    asked: list[str | None] = []
    load = KVModel.load

    def note(*args: Any, device: str | None = None, **named: Any) -> KVModel:
        asked.append(device)
        return load(*args, device=device, **named)

    monkeypatch.setattr(KVModel, "load", note)
    settings = {"model": tmp_path / "model", "embedding": "hashing"}
    Index.create(tmp_path / "i", device="cpu", **settings).close()
    for device in ("cpu", None):
        with Index.open(tmp_path / "i", device=device) as opened:
            assert opened.model.device.type == "cpu"
    assert asked == ["cpu", "cpu", None]
    for device in ("abacus", "meta"):
        with pytest.raises(ParameterError, match=f"device '{device}' cannot be used"):
            Index.open(tmp_path / "i", device=device)
    elsewhere = load(tmp_path / "model")
    monkeypatch.setattr(KVModel, "device", torch.device("cuda"))
    with pytest.raises(ParameterError, match="cpu was asked for, but the model given is on cuda"):
        Index.open(tmp_path / "i", model=elsewhere, device="cpu")


def test_an_embedding_object_is_asked_for_again(
    make_index: MakeIndex, docs: Path, model: KVModel
) -> None:
    index = make_index(embedding=Sided())
    index.add(docs)
    with Index.open(index.path, model=model, embedding=Sided()) as opened:
        assert opened.search("x", 3) == index.search("x", 3)
    with Index.open(index.path, model=model) as opened:
        with pytest.raises(IndexMismatchError, match="cannot be found by name: pass it"):
            opened.search("x")
        with pytest.raises(IndexMismatchError, match="vectors of 2 dimensions"):
            opened.search_by_vector([1.0, 0.0, 0.0])
    with pytest.raises(IndexMismatchError, match="'hashing-2' of 1024"):
        Index.open(index.path, embedding="hashing")


def test_questions_about_an_empty_index(index: Index) -> None:
    assert index.search("anything") == []
    assert index.documents() == []
    assert index.upkeep.verify().ok
    assert index.add([]).to_dict()["added"] == ()
    with pytest.raises(ParameterError, match="k 0: expected a whole number"):
        index.search("x", 0)


def test_a_missing_path_stops_before_any_work(index: Index, docs: Path) -> None:
    with pytest.raises(DocumentError, match=r"absent\.txt: there is no such file or folder"):
        index.add([docs, docs / "absent.txt"])
    assert index.stats().num_documents == 0


# -- what callers choose ---------------------------------------------------------------------------


def test_every_option_says_what_it_does() -> None:
    for options in (IndexSettings, ParseLimits, RayOptions):
        names = [one.name for one, _ in options_of(options)]
        assert names == [one.name for one in fields(options)]
        for name in names:
            assert f"    {name}\n        {text_of(options, name)[:20]}" in str(options.__doc__)


def test_an_unknown_option_makes_nothing(tmp_path: Path, model: KVModel) -> None:
    options: Any = {"chunk_token": 64}
    with pytest.raises(TypeError, match="'chunk_token'"):
        Index.create(tmp_path / "index", model=model, **options)
    assert not (tmp_path / "index").exists()
