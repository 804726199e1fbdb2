"""Chunks encoded after their document's text: right bytes, right names, right records."""

import pytest
import torch

from kvrag.chunk import Chunk, ChunkKey, Document
from kvrag.engine.engine import KVEngine
from kvrag.errors import ParameterError
from kvrag.ingest.coding import read_all
from kvrag.ingest.contexts import add_contexts, parse_context
from kvrag.ingest.index import Index
from kvrag.models.kv_model import KVModel
from tests.ingest.conftest import MakeIndex, stored_bytes

PARTS = [
    "Ines keeps the harbour ledger of Varn, by the old river bank near the northern light.",
    "She wrote the book at the end of the tall clock, and the keeper of it is the brown fox.",
    "Tomas repairs it, and she said that the lazy dog jumps over the ledger of the harbour.",
]
SAGA = Document("saga", "\n\n".join(PARTS))
OTHER = Document("other", "The quick brown fox jumps over the lazy dog near the old river bank.")
QUESTION = "Question: who wrote the book?\nAnswer:"


@pytest.fixture
def make_index(make_index: MakeIndex) -> MakeIndex:
    """Make indexes in which every part is a chunk of its own."""
    return lambda name="index", **settings: make_index(name, **{"chunk_tokens": 48, **settings})


def chunks_of(index: Index, source: str = "saga") -> list[Chunk]:
    return index.get_chunks(index.catalog.chunk_ids_of(source))


def text_of(*texts: str) -> str:
    return "\n\n".join([*texts, QUESTION])


def prompt_of(*texts: str) -> list[dict[str, str]]:
    """Return messages: a chunk is exact only after the head of the model's chat template."""
    return [{"role": "user", "content": text_of(*texts)}]


@pytest.fixture
def in_document(make_index: MakeIndex) -> Index:
    index = make_index(context="document")
    index.add([SAGA, OTHER])
    return index


@pytest.fixture
def with_neighbours(make_index: MakeIndex) -> Index:
    index = make_index(context="neighbours")
    index.add([SAGA, OTHER])
    return index


@pytest.mark.parametrize(("context", "limit"), [("", 256), (":7", 7), (":2000", 2000)])
def test_a_chunk_is_encoded_behind_what_its_document_says_before_it(
    make_index: MakeIndex, model: KVModel, context: str, limit: int
) -> None:
    index = make_index(context=f"document{context}")
    report = index.add([SAGA, OTHER])
    first, second, third = chunks_of(index)
    whole = model.tokenizer(text_of(*PARTS), add_special_tokens=False)["input_ids"]
    for chunk in (first, second, third):
        (context_ids,) = chunk.contexts
        before = next(
            tuple(whole[:i])
            for i in range(len(whole))
            if tuple(whole[i : i + len(chunk.token_ids)]) == chunk.token_ids
        )
        assert context_ids == before[-limit:]
        record = index.open_kv(chunk.chunk_id)
        kv = read_all(record, index.config.spec)
        (expected,) = model.prefill((*index.prefix_ids, *context_ids), [chunk.token_ids])
        assert torch.equal(kv.keys, expected.keys)
        assert torch.equal(kv.values, expected.values)
        (alone,) = model.prefill(index.prefix_ids, [chunk.token_ids])
        assert torch.equal(kv.values, alone.values) == (chunk is first)
    assert report.num_context_tokens == sum(len(c.contexts[0]) for c in (second, third))
    assert report.num_tokens_computed == report.num_tokens
    assert index.stats().context == "document"
    assert index.stats().context_tokens == limit


@pytest.mark.parametrize("context", ["document", "neighbours"])
def test_a_chunk_whose_earlier_text_changed_is_encoded_anew(
    make_index: MakeIndex, context: str
) -> None:
    index = make_index(context=context)
    index.add(SAGA)
    _, before, last = chunks_of(index)
    held = index.open_kv(before.chunk_id, before.contexts[-1])
    changed = PARTS[0].replace("Ines", "Tomas")
    report = index.add(Document("saga", "\n\n".join([changed, *PARTS[1:]])))
    assert report.changed == ("saga",)
    _, after, still = chunks_of(index)
    assert after.text == before.text
    assert after.contexts[-1] != before.contexts[-1]
    # Behind its predecessor the last one is as it was; behind the whole document it is not.
    assert report.num_records == (3 if context == "document" else 2)
    assert (still.contexts == last.contexts) == (context == "neighbours")
    # Who laid a prompt out before the change gets no KV that has seen other text.
    assert held is not None
    assert index.open_kv(before.chunk_id, before.contexts[-1]) is None
    assert index.open_kv(after.chunk_id, after.contexts[-1]) is not None
    assert index.upkeep.verify().ok
    assert index.upkeep.gc().num_records == report.num_records


def says(index: Index, text: str) -> list[int]:
    """Return the places of the document's chunks that keep text in a context."""
    said = {
        chunk.ordinal: "".join(map(index.tokenizer.decode, chunk.contexts))
        for chunk in chunks_of(index)
    }
    return [ordinal for ordinal, context in said.items() if text in context]


@pytest.mark.parametrize(
    ("context", "gone", "forgetting"),
    [
        ("document", 0, [1, 2, 3, 4, 5]),
        ("document:12", 1, [2]),
        ("document:40", 1, [2, 3]),
        ("neighbours", 1, [2]),
        ("neighbours", 5, []),
        ("filler:20", 1, []),
    ],
)
def test_what_is_deleted_is_forgotten_by_what_was_encoded_behind_it(
    make_index: MakeIndex, context: str, gone: int, forgetting: list[int]
) -> None:
    index = make_index(context=context)
    parts = [f"{name} {PARTS[0][5:]}" for name in ("Ada", "Bea", "Cid", "Dan", "Eve", "Fay")]
    index.add([Document("saga", "\n\n".join(parts)), OTHER])
    before = chunks_of(index)
    assert len(before) == len(parts)
    name = parts[gone][:4]
    assert set(says(index, name)) <= set(forgetting)
    assert bool(says(index, name)) == (context != "document:12" and bool(forgetting))
    assert index.delete(chunk_ids=[before[gone].chunk_id]) == 1
    assert says(index, name) == []
    after = chunks_of(index)
    assert [c.ordinal for c in after if c != before[c.ordinal]] == forgetting
    assert all(chunk.contexts == ((),) for chunk in after if chunk.ordinal in forgetting)
    with_text = {
        index.key_of(one) for i in forgetting for one in before[i].encodings() if one.contexts[0]
    }
    index.upkeep.gc()
    assert not with_text & set(index.store.keys())
    # Chunks that have no record alone are computed and counted, until they are mended.
    engine = KVEngine(index, policy="none")
    prompt = prompt_of(*(chunk.text for chunk in after))
    lost = 0 if context == "neighbours" else len(forgetting)
    assert sum(engine.fuse(prompt).report.misses.values()) == lost
    assert index.upkeep.verify(repair=True).num_repaired == lost
    assert not engine.fuse(prompt).report.misses
    assert index.upkeep.verify().ok
    index.add([Document("saga", "\n\n".join(parts))])
    assert chunks_of(index) == before


@pytest.mark.parametrize("context", ["document", "neighbours", "filler:40"])
def test_repair_and_recode_encode_behind_the_same_text(make_index: MakeIndex, context: str) -> None:
    long = Document("long", " ".join(f"{i}: {PARTS[i % 3]}" for i in range(9)))
    index = make_index(context=context)
    index.add([SAGA, OTHER, long])
    good = stored_bytes(index)
    num_chunks = index.stats().num_chunks
    num_second = num_chunks - 3 if context == "neighbours" else 0
    assert len(good) == num_chunks + num_second
    assert index.upkeep.verify().num_records == len(good)
    assert index.stats().num_unreferenced_records == 0
    assert index.upkeep.gc().num_records == 0
    for name in good:
        assert index.store.delete(ChunkKey(name))
    assert index.upkeep.verify(repair=True).ok
    assert stored_bytes(index) == good
    for name, content in good.items():
        index.store.replace(ChunkKey(name), content[:-64])
    index.upkeep.recode("lossless")
    report = index.upkeep.recode("raw")
    assert report.num_records == len(good)
    assert stored_bytes(index) == good
    path = index.path
    index.close()
    with Index.open(path, model=index.model) as opened:
        assert opened.upkeep.verify().ok
        assert opened.config.chunk_context == parse_context(context)
        assert opened.add([SAGA, OTHER, long]).unchanged == ("saga", "other", "long")


def test_a_run_from_the_beginning_of_a_document_is_exact(in_document: Index) -> None:
    engine = KVEngine(in_document, policy="none")
    prompt = prompt_of(*PARTS)
    fused = engine.fuse(prompt)
    found = sum(len(chunk.token_ids) for chunk in chunks_of(in_document))
    assert (fused.report.num_exact, fused.report.num_reused) == (found, 0)
    ids = torch.tensor([engine.prompt_ids(prompt)])
    plain = in_document.model.hf(ids).logits[0, -1]
    torch.testing.assert_close(fused.logits, plain, rtol=1e-4, atol=1e-4)
    assert "after a context" in fused.report.one_line()


@pytest.mark.parametrize(
    ("order", "num_exact_chunks"), [((1, 0, 2), 0), ((0, 2, 1), 1), ((0, 1, 1), 2), ((2,), 0)]
)
def test_elsewhere_it_is_not_called_exact(
    in_document: Index, order: tuple[int, ...], num_exact_chunks: int
) -> None:
    chunks = chunks_of(in_document)
    fused = KVEngine(in_document, policy="none").fuse(prompt_of(*(PARTS[i] for i in order)))
    exact = sum(len(chunks[i].token_ids) for i in order[:num_exact_chunks])
    behind = sum(len(chunks[i].token_ids) for i in order if i)
    assert (fused.report.num_exact, fused.report.num_in_context) == (exact, behind)


@pytest.mark.parametrize(
    ("order", "behind"),
    [((0, 1, 2), (1, 2)), ((1, 0, 2), (2,)), ((2, 0, 1), (1,)), ((1, 2, 0), (2,)), ((2, 1), ())],
)
def test_the_record_is_used_whose_context_stands_before_it(
    with_neighbours: Index, order: tuple[int, ...], behind: tuple[int, ...]
) -> None:
    chunks = chunks_of(with_neighbours)
    assert [len(chunk.contexts) for chunk in chunks] == [1, 2, 2]
    prompt = prompt_of(OTHER.text, *(PARTS[i] for i in order))
    fused = KVEngine(with_neighbours, policy="none").fuse(prompt)
    assert fused.report.num_in_context == sum(len(chunks[i].token_ids) for i in behind)
    assert not fused.report.misses
    assert fused.report.num_chunks == 1 + len(order)
    assert fused.report.num_exact == len(chunks_of(with_neighbours, "other")[0].token_ids)


def test_a_lost_second_record_is_a_miss(with_neighbours: Index) -> None:
    _, second, _ = chunks_of(with_neighbours)
    _, behind = (with_neighbours.key_of(one) for one in second.encodings())
    assert with_neighbours.store.delete(behind)
    fused = KVEngine(with_neighbours, policy="none").fuse(prompt_of(*PARTS[:2]))
    assert fused.report.misses == {"KV not in the store": 1}
    problems = with_neighbours.upkeep.verify(repair=True).problems
    assert [problem.ordinal for problem in problems] == [1]
    again = KVEngine(with_neighbours, policy="none").fuse(prompt_of(*PARTS[:2]))
    assert not again.report.misses


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE chunks SET contexts = x''",
        "UPDATE chunks SET contexts = x'01'",
        "UPDATE chunks SET contexts = x'ffffffff'",
        "UPDATE chunks SET contexts = x'09000000'",
        "DELETE FROM other_keys",
        "UPDATE other_keys SET kv_key = 'zz'",
        "UPDATE other_keys SET place = 2",
        "INSERT INTO other_keys SELECT row, 7, kv_key FROM chunks",
    ],
)
def test_damaged_rows_are_misses_and_mended(with_neighbours: Index, damage: str) -> None:
    good = [chunk.contexts for chunk in chunks_of(with_neighbours)]
    with with_neighbours.catalog._transaction():
        with_neighbours.catalog._connection.execute(damage)
    answer = KVEngine(with_neighbours, policy="none").generate(prompt_of(*PARTS), max_tokens=2)
    assert answer.report.num_tokens
    if "place" not in damage:  # the order is all that the place says
        assert answer.report.misses
        assert not with_neighbours.upkeep.verify().ok
        # Names follow from the tokens. A chunk that is gone can only be added again.
        assert with_neighbours.upkeep.verify(repair=True).ok == ("contexts" not in damage)
        with_neighbours.add([SAGA, OTHER])
    assert with_neighbours.upkeep.verify().ok
    assert [chunk.contexts for chunk in chunks_of(with_neighbours)] == good


def test_context_is_bounded_by_the_window(model: KVModel, make_index: MakeIndex) -> None:
    index = make_index()
    index.add(SAGA)
    chunks = chunks_of(index)
    room = max(len(chunk.token_ids) for chunk in chunks) + 5
    bounded = add_contexts(chunks, model.tokenizer, parse_context("document"), room)
    lengths = [len(one.contexts[0]) for one in bounded]
    assert all(n + len(one.token_ids) <= room for n, one in zip(lengths, chunks, strict=True))
    assert min(lengths[1:]) == 5
    # After a part of its predecessor a chunk would never be recognised.
    alone = add_contexts(chunks, model.tokenizer, parse_context("neighbours"), room)
    assert {chunk.contexts for chunk in alone} == {((),)}


@pytest.mark.parametrize(
    "context", ["later", "none:5", "neighbours:5", "document:0", "filler:", "filler:" + "9" * 5000]
)
def test_settings_that_cannot_be(make_index: MakeIndex, context: str) -> None:
    with pytest.raises(ParameterError, match=r"expected one of none, document\[:TOKENS\], neigh"):
        make_index(context=context)
