"""Prompts with parts of indexed documents that were cut elsewhere."""

import json
import re
from collections.abc import Iterator

import pytest
import torch

from kvrag.chunk import Document
from kvrag.engine.engine import KVEngine
from kvrag.engine.prompt_reader import MISS_CATALOG, PromptReader
from kvrag.engine.request import Request
from kvrag.errors import StoreError
from kvrag.fusion.fuser import FOUND
from kvrag.fusion.layout import Layout
from kvrag.fusion.runs import ABSENT, SPACE
from kvrag.ingest.index import Index
from kvrag.llms.vllm.plan import TokenFinder
from kvrag.models.kv_model import KVModel
from kvrag.models.writers import CACHE_ARGUMENT
from tests.support.rag import save_model

NAMES = re.findall(r"\w+", "Ines Tomas Varn Berta Carlo Dora Emil Frida Gusti Hanna Ivo Jana")
TEXT = "\n\n".join(
    f"{name} keeps ledger {number} of the harbour, near the old river bank, and the tall clock of "
    f"{NAMES[number - 1]} was repaired in the year {1800 + 7 * number} by the lazy dog's keeper."
    for number, name in enumerate(NAMES)
)
QUESTION = "\n\nQuestion: who keeps it?\nAnswer:"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("runs")
    save_model(folder / "model", head_dim=32)
    return str(folder)


@pytest.fixture(scope="module")
def cut(folder: str) -> Iterator[Index]:
    """An index of one document, in chunks of at most 160 tokens."""
    model = KVModel.load(f"{folder}/model", dtype="float32")
    options = {"embedding": "hashing", "chunk_tokens": 160}
    with Index.create(f"{folder}/index", model=model, **options) as index:
        index.add([Document("harbour", TEXT)])
        assert index.stats().num_chunks > 3
        yield index


def laid_out(index: Index, prompt: str) -> Layout:
    return PromptReader(index).lay_out(Request(prompt)).layout


def middle(index: Index) -> str:
    """Return a text over the border of two chunks that begins and ends inside them."""
    first, second = index.get_chunks(index.catalog.chunk_ids_of("harbour"))[:2]
    start = TEXT.index(first.text) + len(first.text) // 2
    end = TEXT.index(second.text) + len(second.text) // 2
    return TEXT[start:end]


def test_text_cut_elsewhere_is_reused(cut: Index) -> None:
    layout = laid_out(cut, middle(cut) + QUESTION)
    tail, head = layout.spans
    assert tail.chunk_start > 0
    assert head.chunk_start == 0
    chunks = {one.chunk_id: one for one in cut.get_chunks(layout.chunk_ids)}
    for span in layout.spans:
        stored = chunks[span.chunk_id].token_ids[span.chunk_start : span.chunk_end]
        assert stored == layout.token_ids[span.prompt_start : span.prompt_end]
        assert not layout.is_exact(span)
    num_tokens = len(cut.tokenizer(middle(cut), add_special_tokens=False)["input_ids"])
    assert layout.num_reused >= num_tokens - 6


def test_the_sources_of_an_answer_include_chunks_of_runs(cut: Index) -> None:
    answer = KVEngine(cut).generate(middle(cut) + QUESTION, max_tokens=1)
    assert [source.ordinal for source in answer.sources] == [0, 1]
    assert answer.report.num_chunks == 2


def test_ratio_1_is_full_prefill(cut: Index) -> None:
    engine = KVEngine(cut)
    prompt = middle(cut) + QUESTION
    made = engine.fuse(prompt, policy="deviation", ratio=1.0)
    assert made.report.num_recomputed > 100
    with torch.no_grad():
        ids = torch.tensor([engine.prompt_ids(prompt)])
        plain = cut.model.hf(ids, use_cache=True)
    torch.testing.assert_close(made.logits, plain.logits[0, -1], atol=1e-5, rtol=1e-5)
    keys = getattr(plain, CACHE_ARGUMENT).layers[-1].keys
    torch.testing.assert_close(made.kv.keys[-1][:, :, : keys.shape[2]], keys, atol=1e-5, rtol=1e-5)


def test_whole_chunks_come_first(cut: Index) -> None:
    chunks = cut.get_chunks(cut.catalog.chunk_ids_of("harbour"))
    whole = laid_out(cut, "\n\n".join([chunks[1].text, chunks[0].text]) + QUESTION)
    assert [(span.chunk_id, span.chunk_start) for span in whole.spans] == [
        (chunks[1].chunk_id, 0),
        (chunks[0].chunk_id, 0),
    ]


def test_lines_are_found_one_by_one_in_escaped_text(cut: Index) -> None:
    chunks = cut.get_chunks(cut.catalog.chunk_ids_of("harbour"))
    prompt = json.dumps([chunk.text for chunk in chunks])
    layout = laid_out(cut, prompt + QUESTION)
    assert layout.num_reused > 0.8 * len(layout.token_ids)
    assert any(len([s for s in layout.spans if s.chunk_id == c.chunk_id]) > 1 for c in chunks)


def test_chunks_added_and_removed(folder: str) -> None:
    options = {"embedding": "hashing", "chunk_tokens": 160}
    with Index.create(f"{folder}/other", model=f"{folder}/model", **options) as index:
        prompt = TEXT[100:700] + QUESTION
        assert not laid_out(index, prompt).spans
        index.add([Document("harbour", TEXT)])
        num_reused = laid_out(index, prompt).num_reused
        assert num_reused > 100
        for number in range(3):
            index.add([Document(f"more-{number}", f"{number} and {TEXT[::-1]}")])
        before = index.run_finder.fingerprints.size_bytes
        assert laid_out(index, prompt).num_reused == num_reused
        index.delete(sources=["harbour"])
        assert not laid_out(index, prompt).spans
        index.delete(sources=["more-0", "more-1"])
        assert 0 < index.run_finder.fingerprints.size_bytes < before
        with Index.open(f"{folder}/other") as again:
            again.add([Document("harbour", TEXT)])
        assert laid_out(index, prompt).num_reused == num_reused


def test_the_token_finder_of_servers_finds_the_same(cut: Index) -> None:
    layout = laid_out(cut, middle(cut) + QUESTION)
    assert TokenFinder(cut).find(layout.token_ids).spans == layout.spans


def test_a_catalog_that_cannot_be_read_costs_only_the_runs(
    cut: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise StoreError("gone")

    monkeypatch.setattr(cut.catalog.texts, "token_ids_of", fail)
    layout = laid_out(cut, middle(cut) + QUESTION)
    assert layout.misses[MISS_CATALOG] == 1
    assert all(span.chunk_start == 0 for span in layout.spans)


def test_every_fresh_token_has_a_reason(cut: Index) -> None:
    engine = KVEngine(cut)
    report = engine.fuse(middle(cut) + QUESTION).report
    assert sum(report.fresh_reasons.values()) == report.num_fresh
    assert report.fresh_reasons[ABSENT] > 0
    joined = " ".join(TEXT.split())
    assert engine.fuse(joined + QUESTION).report.fresh_reasons[SPACE] > 0
    assert engine.fuse(middle(cut), reuse=False).report.fresh_reasons == {}
    lost = cut.catalog.chunk_ids_of("harbour")[0]
    cut.store.delete(cut.key_of(cut.get_chunks([lost])[0]))
    report = engine.fuse(middle(cut) + QUESTION).report
    assert report.fresh_reasons[FOUND] > 20
    assert sum(report.fresh_reasons.values()) == report.num_fresh
