"""Chunks of one text in several documents, each encoded after its own document's text."""

from collections.abc import Sequence

import pytest
import torch

from kvrag.chunk import Chunk, Document
from kvrag.engine.engine import KVEngine
from kvrag.fusion.layout import MISS_OWNER_UNCLEAR
from kvrag.ingest.index import Index
from tests.ingest.conftest import MakeIndex
from tests.support.models import HEAD

A = "Ines is the keeper of the harbour ledger of Varn and writes each ship down before noon today."
B = "Tomas is the master of the northern light and was born near the old river bank of the town."
SHARED = "The keeper repaired the tall clock in the year of the flood, and was paid by the town."
QUESTION = "Question: who repaired it?\nAnswer:"


@pytest.fixture
def make_index(make_index: MakeIndex) -> MakeIndex:
    def make(name: str = "index", **settings: object) -> Index:
        index = make_index(name, **{"chunk_tokens": 60, **settings})
        index.add([Document("a", f"{A}\n\n{SHARED}"), Document("b", f"{B}\n\n{SHARED}")])
        return index

    return make


def prompt_of(*texts: str) -> str:
    return HEAD + "\n\n".join([*texts, QUESTION])


def shared_chunks(index: Index) -> dict[str, Chunk]:
    """Return the chunk of the shared text by its document."""
    ids = [index.catalog.chunk_ids_of(source)[1] for source in "ab"]
    return {chunk.source: chunk for chunk in index.get_chunks(ids)}


def sources(engine: KVEngine, prompt: str, hints: Sequence[str] = ()) -> list[str]:
    """Return whose record of the shared text is used, place by place; `-` for none behind text."""
    fused = engine.fuse(prompt, hints=hints)
    shared = {chunk.chunk_id: source for source, chunk in shared_chunks(engine.index).items()}
    return [
        shared[span.chunk_id] if span.context_ids else "-"
        for span in fused.layout.spans
        if span.chunk_id in shared
    ]


@pytest.mark.parametrize("context", ["document", "neighbours"])
@pytest.mark.parametrize("first", [A, B])
def test_the_document_in_the_prompt_is_meant(
    make_index: MakeIndex, context: str, first: str
) -> None:
    index = make_index(context=context)
    engine = KVEngine(index, policy="none", max_tokens=2)
    prompt = prompt_of(first, SHARED)
    fused = engine.fuse(prompt)
    assert fused.report.num_reused == 0
    ids = torch.tensor([engine.prompt_ids(prompt)])
    plain = index.model.hf(ids).logits[0, -1]
    torch.testing.assert_close(fused.logits, plain, rtol=1e-4, atol=1e-4)
    own = "a" if first is A else "b"
    answer = engine.generate(prompt)
    assert [source.source for source in answer.sources] == [own, own]


@pytest.mark.parametrize("context", ["document", "neighbours"])
def test_in_a_prompt_of_both_each_follows_its_own(make_index: MakeIndex, context: str) -> None:
    engine = KVEngine(make_index(context=context), policy="none")
    shared = shared_chunks(engine.index)
    assert shared["a"].contexts != shared["b"].contexts
    for hints in ([], [chunk.chunk_id for chunk in shared.values()]):
        assert sources(engine, prompt_of(A, SHARED, B, SHARED), hints) == ["a", "b"]
        assert sources(engine, prompt_of(B, SHARED, A, SHARED), hints) == ["b", "a"]
        assert sources(engine, prompt_of(A, B, SHARED), hints) == ["b"]


def test_whose_it_is_cannot_be_told(make_index: MakeIndex) -> None:
    engine = KVEngine(make_index(context="document"), policy="none", max_tokens=2)
    for prompt in (prompt_of(SHARED), prompt_of(SHARED, A, B), prompt_of(SHARED[:70])):
        report = engine.fuse(prompt).report
        assert report.misses == {MISS_OWNER_UNCLEAR: 1}
        assert report.num_in_context == 0
        assert engine.generate(prompt).sources
    hint = [shared_chunks(engine.index)["b"].chunk_id]
    assert sources(engine, prompt_of(SHARED), hint) == ["b"]
    assert sources(engine, prompt_of(SHARED[:70]), hint) == ["b"]
    assert sources(engine, prompt_of(SHARED, B)) == ["b"]
    assert sources(engine, prompt_of(B, SHARED[:70])) == ["b"]


@pytest.mark.slow
def test_text_of_very_many_documents_is_computed(make_index: MakeIndex) -> None:
    index = make_index(context="document")
    index.add([Document(f"more-{i}", f"{A}{i}\n\n{SHARED}") for i in range(300)])
    engine = KVEngine(index, policy="none")
    for text in (SHARED, SHARED[:70]):
        fused = engine.fuse(prompt_of("So it is.", B, text))
        assert fused.report.misses == {MISS_OWNER_UNCLEAR: 1}
        # A record that is exact needs no document.
        assert engine.fuse(prompt_of(B, text)).report.num_in_context
    assert sources(engine, prompt_of(SHARED), [shared_chunks(index)["b"].chunk_id]) == ["b"]
