"""Context ``similar``: chunks are encoded after those that are nearest to them."""

import contextlib
import random
import sqlite3
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kvrag.chunk import Chunk, Document
from kvrag.cli.upkeep import _print_verified
from kvrag.engine.engine import KVEngine
from kvrag.errors import DocumentError, ParameterError
from kvrag.fusion.policies import DEFAULT_POLICY
from kvrag.ingest.catalogfile import damage_of
from kvrag.ingest.companions import Passage, choose
from kvrag.ingest.config import IndexConfig
from kvrag.ingest.contexts import LEAST_TOKENS
from kvrag.ingest.encoders import Encoders
from kvrag.ingest.index import Index
from kvrag.ingest.schema import Heads, pack_ids
from kvrag.models.kv_model import EncodedPrefix, KVModel
from tests.ingest.conftest import Machine, MakeIndex
from tests.support.folders import key_file
from tests.support.models import HEAD

NUM_TOKENS = 48
SIMILAR = f"similar:{NUM_TOKENS}"
WORDS = {
    "mill": "grain stone wheel brook miller flour sack weir sluice rye oats barley",
    "clock": "hour bell spring dial tower hand pendulum minute gear weight chime noon",
    "ferry": "river rope landing oar passenger flood pier crossing barge tide shore fare",
}


def page(subject: str, number: int, more: str = "", folder: str = "") -> Document:
    """Return a page whose words are those of its subject, in an order of its own."""
    words = random.Random(f"{subject} {number}").choices(WORDS[subject].split(), k=12)
    source = f"{folder or subject}/{subject} {number}.txt"
    return Document(source, f"{subject} {' '.join(words)}{more}")


PAGES = [page(subject, number) for number in range(1, 5) for subject in WORDS]


@pytest.fixture
def index(make_index: MakeIndex) -> Index:
    return filled(make_index)


def filled(make_index: MakeIndex, name: str = "index", **changed: object) -> Index:
    index = make_index(name, **{"context": SIMILAR, "embedding": "hashing", **changed})
    index.add(PAGES)
    return index


def chunks_of(index: Index) -> list[Chunk]:
    ids = [one for row in index.documents() for one in index.catalog.chunk_ids_of(row.source)]
    return index.catalog.chunks(ids)


def standing(index: Index, chunk: Chunk, of: Sequence[Document] = PAGES) -> set[str]:
    """Return the sources of the texts that a chunk was encoded after."""
    before = pack_ids(chunk.contexts[0])
    return {one.source for one in of if Heads([pack_ids(ids_of(index, one))]).are_in(before)}


def ids_of(index: Index, document: Document) -> list[int]:
    ids: list[int] = index.tokenizer.encode(document.text, add_special_tokens=False)
    return ids


def is_after(index: Index, document: Document) -> list[Chunk]:
    return [one for one in chunks_of(index) if document.source in standing(index, one)]


def test_chunks_are_encoded_after_their_nearest(index: Index, model: KVModel) -> None:
    for chunk in chunks_of(index):
        context, alone = chunk.contexts
        assert alone == ()
        assert LEAST_TOKENS <= len(context) <= NUM_TOKENS
        before = standing(index, chunk)
        assert before
        assert chunk.source not in before
        assert {Path(one).parent for one in before} == {Path(chunk.source).parent}
        found = index.catalog.chunk_and_keys(chunk.chunk_id)
        assert found[1] == [index.key_of(one).digest for one in chunk.encodings()]
    assert index.upkeep.verify().ok
    assert index.stats().num_records == len(PAGES)


def test_what_stands_before_several_is_computed_once(
    make_index: MakeIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[tuple[int, ...]] = []
    encode_prefix = KVModel.encode_prefix

    def noting(self: KVModel, ids: tuple[int, ...]) -> EncodedPrefix:
        encoded.append(ids)
        return encode_prefix(self, ids)

    monkeypatch.setattr(KVModel, "encode_prefix", noting)
    subjects = [page(subject, number) for subject in WORDS for number in range(20)]
    index = make_index(context="similar:128")
    report = index.add(subjects)
    assert len(encoded) == len(set(encoded)) < len(subjects)
    num_before = sum(map(len, encoded)) - len(encoded) * len(index.prefix_ids)
    assert report.num_context_tokens == num_before <= 1.1 * report.num_tokens


def random_passages(count: int, num_tokens: int, dim: int = 8) -> list[Passage]:
    drawn = np.random.default_rng(5)
    vectors = drawn.normal(size=(count, dim)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return [
        Passage(f"c{n}", f"s{n}", drawn.integers(0, 9999, num_tokens).astype(np.int32), one)
        for n, one in enumerate(vectors)
    ]


def test_own_documents_come_last_and_copies_never() -> None:
    one, other, third, fourth = random_passages(4, 64)
    near = replace(other, vector=one.vector, source=one.source)
    copy = replace(third, vector=one.vector, token_ids=one.token_ids)
    (before, _), *_ = choose([one], [near, copy, fourth], 64)
    assert before == tuple(fourth.token_ids.tolist())
    # Without others, its own; a copy of a part is one too.
    part = replace(copy, token_ids=np.concatenate([one.token_ids[20:], third.token_ids[:20]]))
    assert choose([one], [near, part], 64)[0][1] == (near.chunk_id,)
    short = replace(fourth, token_ids=fourth.token_ids[: LEAST_TOKENS - 1])
    assert choose([one], [copy, short], 64) == [((), ())]
    # A chunk of a few tokens that stands in another one.
    few = replace(one, token_ids=near.token_ids[30:35])
    assert choose([few], [near, fourth], 64)[0][1] == (fourth.chunk_id,)
    elsewhere = replace(fourth, folder="elsewhere")
    assert choose([one], [elsewhere], 64) == [((), ())]


def test_a_first_document_gets_its_context_with_the_next(make_index: MakeIndex) -> None:
    index = make_index(context=SIMILAR)
    index.add(PAGES[0])
    assert [chunk.contexts for chunk in chunks_of(index)] == [((),)]
    index.add(PAGES[3])
    found = {chunk.source: standing(index, chunk) for chunk in chunks_of(index)}
    assert found == {PAGES[0].source: {PAGES[3].source}, PAGES[3].source: {PAGES[0].source}}
    assert index.upkeep.verify().ok


def test_chunks_of_one_document_precede_each_other(make_index: MakeIndex) -> None:
    parts = [page(subject, number).text for number in range(1, 9) for subject in WORDS]
    index = make_index(context=SIMILAR, chunk_tokens=64, embedding="hashing")
    index.add(Document("book.txt", ".\n\n".join(parts)))
    chunks = chunks_of(index)
    assert len(chunks) > 3
    for chunk in chunks:
        before = pack_ids(chunk.contexts[0])
        seen = [one for one in chunks if Heads([pack_ids(one.token_ids)]).are_in(before)]
        assert seen
        assert chunk not in seen
    # What is cut anew is encoded anew, and after nothing that is gone.
    index.add(Document("book.txt", ".\n\n".join(parts[: len(parts) // 2])))
    heads = [Heads([pack_ids(one.token_ids)]) for one in chunks_of(index)]
    for chunk in chunks_of(index):
        assert any(one.are_in(pack_ids(chunk.contexts[0])) for one in heads)
    assert index.upkeep.verify().ok


@pytest.mark.parametrize("by_chunk", [False, True])
def test_nothing_that_saw_a_deleted_text_remains(
    index: Index, by_chunk: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = next(one for one in PAGES if is_after(index, one))
    seen = {chunk.chunk_id: index.key_of(chunk) for chunk in is_after(index, gone)}
    ids = index.catalog.chunk_ids_of(gone.source)
    assert index.delete(**({"chunk_ids": ids} if by_chunk else {"sources": [gone.source]})) == 1
    assert not is_after(index, gone)
    assert all(chunk.contexts == ((),) for chunk in index.get_chunks([*seen]))
    assert not damage_of(index.catalog)
    assert index.catalog.stored.has_sound_tables()
    index.upkeep.gc()
    assert not any(map(index.store.contains, seen.values()))
    # Until the next ingestion, prompts compute them, or they are made alone while nobody asks.
    found = index.upkeep.verify()
    assert (found.ok, found.num_later) == (True, len(seen))
    _print_verified(found)
    assert "to be made again" in capsys.readouterr().out
    assert index.on_demand.make_all() == len(PAGES) - 1
    found = index.upkeep.verify()
    assert (found.ok, found.num_later) == (True, 0)
    report = index.add([])
    assert report.num_records == len(seen)
    assert all(standing(index, chunk) for chunk in index.get_chunks([*seen]))
    assert not is_after(index, gone)
    assert index.upkeep.verify().ok
    assert not index.add([]).num_records


def test_a_record_that_the_store_lost_is_missing(make_index: MakeIndex) -> None:
    index = make_index(context=SIMILAR, embedding="hashing")

    def after_a_loss() -> tuple[bool, int]:
        (chunk,) = chunks_of(index)
        assert chunk.contexts == ((),)
        assert index.store.delete(index.key_of(chunk))
        found = index.upkeep.verify()
        return found.ok, found.num_later

    index.add(PAGES[0])
    assert after_a_loss() == (False, 0)
    assert index.upkeep.verify(repair=True).num_repaired == 1
    index.add(PAGES[3])
    index.delete(sources=[PAGES[3].source])
    assert after_a_loss() == (True, 1)
    index.add([])  # which stores the record of the chunk alone
    assert after_a_loss() == (False, 0)


def test_a_record_of_an_equal_text_that_nothing_preceded_is_missing(make_index: MakeIndex) -> None:
    index = make_index(context=SIMILAR, embedding="hashing", trust="folder")
    alone = page("mill", 1, folder="alone")
    index.add([alone, page("mill", 1), page("mill", 2)])
    index.delete(sources=[page("mill", 2).source])
    (key,) = {index.key_of(chunk) for chunk in chunks_of(index)}
    index.store.delete(key)
    found = index.upkeep.verify()
    assert (found.ok, found.num_later) == (False, 0)


def test_an_update_keeps_what_it_can(make_index: MakeIndex) -> None:
    index = make_index(context=SIMILAR)
    old, new = (page("mill", 8, f". {more}", "long") for more in ("At first.", "Then another."))
    beside = " ".join(page("mill", 5 + number).text for number in range(3))
    index.add([replace(one, text=f"{beside} {one.text}") for one in (old,)] + PAGES)
    before = {chunk.token_ids: chunk.contexts for chunk in chunks_of(index)}
    report = index.add(replace(new, text=f"{beside} {new.text}"))
    assert report.changed == (new.source,)
    after = {chunk.token_ids: chunk.contexts for chunk in chunks_of(index)}
    gone, come = before.keys() - after.keys(), after.keys() - before.keys()
    assert gone
    assert come
    heads = Heads(map(pack_ids, gone))
    changed = {ids for ids in before.keys() & after.keys() if before[ids] != after[ids]}
    assert all(heads.are_in(pack_ids(before[ids][0])) for ids in changed)
    assert not any(heads.are_in(pack_ids(one[0])) for one in after.values())
    assert report.num_records == len(come) + len(changed)
    assert all(one[0] for one in after.values())
    assert index.upkeep.verify().ok


def damage(index: Index, of: Document) -> None:
    """Change a token of a document's only chunk in the catalog."""
    connection = index.catalog._connection
    connection.execute(
        "UPDATE chunks SET token_ids = CAST(x'09000000' || substr(token_ids, 5) AS BLOB), "
        "text = CAST(x'ff' AS TEXT) WHERE source = ?",
        (of.source,),
    )
    if connection.in_transaction:
        connection.execute("COMMIT")


def test_a_damaged_text_that_is_deleted_is_forgotten_too(index: Index) -> None:
    gone = next(one for one in PAGES if is_after(index, one))
    damage(index, gone)
    index.delete(sources=[gone.source])
    assert not is_after(index, gone)
    index.add([])
    assert all(chunk.contexts[0] for chunk in chunks_of(index))
    assert not is_after(index, gone)


def test_what_saw_a_text_that_damage_took_forgets_it(index: Index) -> None:
    gone = next(one for one in PAGES if is_after(index, one))
    seen = {chunk.chunk_id for chunk in is_after(index, gone)}
    others = {one.chunk_id: one.contexts for one in chunks_of(index) if one.chunk_id not in seen}
    damage(index, gone)
    index.upkeep.verify(repair=True)
    assert len(chunks_of(index)) == len(PAGES) - 1
    assert not is_after(index, gone)
    after = {one.chunk_id: one.contexts for one in chunks_of(index)}
    assert {one: after.get(one, ids) for one, ids in others.items()} == others
    assert index.upkeep.verify().ok


def test_a_document_that_fails_stands_before_nothing(
    make_index: MakeIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = PAGES[0]
    prefill = Encoders.prefill

    def failing(self: Encoders, chunk: Chunk, *more: Callable[[], None]) -> object:
        if chunk.source == bad.source:
            raise DocumentError("it cannot be computed")
        return prefill(self, chunk, *more)

    monkeypatch.setattr(Encoders, "prefill", failing)
    index = make_index(context=SIMILAR)
    report = index.add(PAGES)
    assert [one.source for one in report.failed] == [bad.source]
    assert not is_after(index, bad)
    assert len(chunks_of(index)) == len(PAGES) - 1
    assert all(chunk.contexts[0] for chunk in chunks_of(index))
    assert index.upkeep.verify().ok


def test_trust_ends_at_a_folder(make_index: MakeIndex) -> None:
    mine = [page("mill", number, folder="mine") for number in range(1, 4)]
    others = [page("mill", number, folder="theirs") for number in range(4, 7)]
    equal = replace(mine[0], source="theirs/equal.txt")
    index = make_index(context=SIMILAR, trust="folder")
    index.add([*mine, *others[:2], equal])
    index.add(others[2:])
    for chunk in chunks_of(index):
        before = standing(index, chunk, [*mine, *others])
        assert before or chunk.source == equal.source
        assert {Path(one).parent for one in before - {mine[0].source}} <= {
            Path(chunk.source).parent
        }
    assert IndexConfig.load(index.path).trust == "folder"
    assert filled(make_index, "all").config.trust == "index"
    with pytest.raises(ParameterError, match="index or folder"):
        make_index("wrong", context=SIMILAR, trust="nobody")
    with pytest.raises(ParameterError, match="only context similar"):
        make_index("none", context="filler:40", trust="folder")


def test_text_that_moves_to_another_folder_is_forgotten_in_its_own(make_index: MakeIndex) -> None:
    mine = [page("mill", number, folder="mine") for number in range(1, 4)]
    theirs = [page("mill", number, folder="theirs") for number in range(4, 7)]
    index = make_index(context=SIMILAR, trust="folder")
    index.add([*mine, *theirs])
    seen = next(
        one for one in mine if any(standing(index, each, [one]) for each in chunks_of(index))
    )
    index.add([replace(seen, text=theirs[0].text), replace(theirs[0], text=seen.text)])
    for chunk in chunks_of(index):
        assert chunk.source.startswith("theirs") or not standing(index, chunk, [seen])
        assert chunk.source.startswith("mine") or not standing(index, chunk, theirs[:1])


def test_prompts_find_the_records(index: Index, model: KVModel) -> None:
    texts = [one.text for one in PAGES[:4]]
    prompt = HEAD + "\n\n".join([*texts, "Question: who keeps the ledger?\nAnswer:"])
    KVEngine(index).fuse(prompt)
    index.on_demand.flush()
    fused = KVEngine(index, policy="none").fuse(prompt)
    first, *others = fused.layout.spans
    assert first.context_ids == ()
    assert all(one.context_ids for one in others)
    assert (fused.report.num_exact, fused.report.misses) == (first.length, {})
    whole = KVEngine(index, policy="deviation", ratio=1.0).fuse(prompt)
    plain = model.hf(torch.tensor([whole.layout.token_ids])).logits[0, -1]
    torch.testing.assert_close(whole.logits, plain, rtol=1e-4, atol=1e-4)


def test_the_default_policy_computes_less_again_after_it(make_index: MakeIndex) -> None:
    index = filled(make_index)
    prompt = HEAD + "\n\n".join([*(one.text for one in PAGES[:4]), "Question: who?\nAnswer:"])

    def share(engine: KVEngine, **options: object) -> float:
        report = engine.fuse(prompt, **options).report
        return report.num_recomputed / (report.num_recomputed + report.num_reused)

    engine = KVEngine(index, never_slower=False)
    assert engine.defaults.ratio == 0.05
    assert 0.04 < share(engine) == share(engine, policy=DEFAULT_POLICY) < 0.07
    # What is asked for is done, and other policies have their own.
    assert 0.14 < share(engine, ratio=0.15) == share(engine, policy="query") < 0.17
    assert 0.29 < share(KVEngine(index, ratio=0.3, never_slower=False)) < 0.32
    assert KVEngine(index, policy="query").defaults.ratio is None
    other = filled(make_index, "other", context="filler:40")
    assert KVEngine(other).defaults.ratio is None


def test_an_encrypted_index_shows_nothing_of_it(make_index: MakeIndex, tmp_path: Path) -> None:
    pytest.importorskip("sqlcipher3")
    key = key_file(tmp_path / "key")
    index = filled(make_index, store=f"file:{tmp_path / 'kv'}?key_file={key}")
    assert all(standing(index, chunk) for chunk in chunks_of(index))
    held = [pack_ids(chunk.contexts[0][:LEAST_TOKENS]) for chunk in chunks_of(index)]
    for path in (one for one in tmp_path.rglob("*") if one.is_file()):
        content = path.read_bytes()
        assert not any(one in content for one in held)
    assert index.upkeep.verify().ok


@pytest.mark.parametrize("by_ingesting", [False, True])
def test_machines_forget_what_a_deletion_takes_along(
    machine: Machine, folder_url: str, tmp_path: Path, by_ingesting: bool
) -> None:
    for one in PAGES:
        (tmp_path / one.source).parent.mkdir(exist_ok=True)
        (tmp_path / one.source).write_text(one.text)
    folders = [tmp_path / subject for subject in WORDS]
    one = machine("one", folder_url, context=SIMILAR)
    one.add(folders)
    other = machine("other", folder_url)
    gone = next(page for page in PAGES if is_after(one, page))
    path = tmp_path / gone.source
    if by_ingesting:
        path.unlink()
        assert other.add(folders).removed == (str(path),)
    else:
        other.delete(sources=[str(path)])
    one.refresh()
    assert not is_after(one, gone)
    assert chunks_of(one) == chunks_of(other)
    one.add([])
    other.refresh()
    assert all(chunk.contexts[0] for chunk in chunks_of(other))
    assert chunks_of(one) == chunks_of(other)
    assert one.upkeep.verify().ok
    assert other.upkeep.verify().ok


def test_a_deletion_elsewhere_during_an_ingestion_counts(
    machine: Machine, folder_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = machine("one", folder_url, context=SIMILAR)
    one.add(PAGES)
    other = machine("other", folder_url)
    new, gone = page("mill", 9), [one for one in PAGES if "mill" in one.source]
    commit = type(one._storage.log).commit

    def late(self: object, change: object) -> int:
        monkeypatch.undo()
        other.delete(sources=[page.source for page in gone])
        return int(commit(self, change))

    monkeypatch.setattr(type(one._storage.log), "commit", late)
    one.add(new)
    for index in (one, other):
        index.refresh()
        assert not any(is_after(index, page) for page in gone)
        assert new.source in {chunk.source for chunk in chunks_of(index)}


def test_it_must_fit(make_index: MakeIndex) -> None:
    with pytest.raises(ParameterError, match="at most similar:"):
        make_index(context="similar:2040")
    with pytest.raises(ParameterError, match="at least 32 tokens"):
        make_index(context="similar:31")


def test_contexts_are_looked_through_one_by_one(index: Index) -> None:
    gone = next(one for one in PAGES if is_after(index, one))
    with contextlib.closing(sqlite3.connect(index.path / "catalog.sqlite")) as connection:
        names = [name for _, name, *_ in connection.execute("PRAGMA table_info(chunks)")][1:]
        values = ["zeroblob(1000000)" if name == "contexts" else name for name in names]
        values[names.index("chunk_id")] = values[names.index("source")] = "hex(randomblob(20))"
        for _ in range(30):
            connection.execute(
                f"INSERT INTO chunks ({', '.join(names)}) "
                f"SELECT {', '.join(values)} FROM chunks WHERE row = 1"
            )
        connection.commit()
    tracemalloc.start()
    try:
        index.delete(sources=[gone.source])
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()
