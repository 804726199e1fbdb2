"""Contract 2: damaged or missing KV becomes full prefill, counted, never wrong, never raised."""

from collections.abc import Callable
from pathlib import Path

import pytest

from kvrag.chunk import ChunkKey
from kvrag.codec.container import header_size
from kvrag.engine.engine import KVEngine
from kvrag.engine.prompt_reader import MISS_CATALOG
from kvrag.errors import IndexFormatError
from kvrag.fusion.slices import MISS_ABSENT, MISS_DAMAGED
from kvrag.ingest.index import Index
from kvrag_testing.bench_top import TEXTS
from kvrag_testing.store_contract import stored
from tests.support.rag import text_index

PROMPT = "Context:\n\n" + "\n\n".join(TEXTS) + "\n\nQuestion: who keeps it?\nAnswer:"


def keys(index: Index) -> list[ChunkKey]:
    return sorted(index.store.keys())


def damage(index: Index, key: ChunkKey, change: Callable[[bytearray], object]) -> None:
    content = bytearray(stored(index.store, key) or b"")
    change(content)
    index.store.replace(key, bytes(content))


def flip(offset: int) -> Callable[[bytearray], object]:
    def change(content: bytearray) -> None:
        content[offset] ^= 0x10

    return change


@pytest.fixture
def index(tmp_path: Path) -> Index:
    return text_index(tmp_path / "index", "llama")


def check_counted(index: Index, lost: ChunkKey, reason: str) -> None:
    engine = KVEngine(index, max_tokens=8, session_bytes=0)
    # Not all tokens, or nothing would be loaded.
    answer = engine.generate(PROMPT, ratio=0.5)
    assert dict(answer.report.misses) == {reason: 1}
    assert answer.report.num_chunks == len(TEXTS) - 1
    index.store.delete(lost)
    expected = engine.generate(PROMPT, ratio=0.5)
    assert dict(expected.report.misses) == {MISS_ABSENT: 1}
    assert answer.text == expected.text
    report = answer.report
    assert report.num_recomputed == expected.report.num_recomputed
    assert engine.generate(PROMPT, ratio=1.0).text == engine.generate(PROMPT, reuse=False).text
    counted = report.num_exact + report.num_reused + report.num_recomputed + report.num_fresh
    assert counted == report.num_tokens


def cut(share: float) -> Callable[[bytearray], object]:
    return lambda content: content.__delitem__(slice(int(share * len(content)), None))


@pytest.mark.parametrize(
    "change", [*(flip(at) for at in (0, 5000, -5000, -20)), *(cut(at) for at in (0.0, 0.5, 0.999))]
)
def test_a_damaged_record(index: Index, change: Callable[[bytearray], object]) -> None:
    key = keys(index)[1]
    damage(index, key, change)
    check_counted(index, key, MISS_DAMAGED)


def test_a_missing_record_and_one_of_another_chunk(index: Index) -> None:
    first, second, *_ = keys(index)
    content = stored(index.store, first) or b""
    index.store.delete(first)
    check_counted(index, first, MISS_ABSENT)
    index.store.put(first, content)
    index.store.replace(first, stored(index.store, second) or b"")
    check_counted(index, first, MISS_DAMAGED)


@pytest.mark.parametrize("load_threads", [0, 2])
def test_damage_where_nothing_is_read_costs_nothing(index: Index, load_threads: int) -> None:
    first, second, *_ = keys(index)
    damage(index, first, flip(-100))
    # In layer 0, right behind the header, all tokens are computed.
    damage(index, second, flip(header_size(index.model.spec.num_layers)))
    engine = KVEngine(index, policy="deviation", load_threads=load_threads)
    assert dict(engine.fuse(PROMPT).report.misses) == {MISS_DAMAGED: 1}


def test_a_catalog_that_cannot_be_read(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise IndexFormatError("catalog.sqlite is damaged")

    monkeypatch.setattr(index.catalog, "find_chunks", refuse)
    engine = KVEngine(index, max_tokens=8)
    answer = engine.generate(PROMPT)
    assert dict(answer.report.misses) == {MISS_CATALOG: 1}
    assert answer.report.num_fresh == answer.report.num_tokens
    assert answer.text == engine.generate(PROMPT, reuse=False).text


def test_two_damaged_records_and_a_repeated_chunk(index: Index) -> None:
    for key in keys(index)[:2]:
        damage(index, key, flip(-100))
    engine = KVEngine(index, max_tokens=8)
    prompt = "\n\n".join([*TEXTS, *TEXTS, "Question: who keeps it?\nAnswer:"])
    answer = engine.generate(prompt, ratio=0.5)
    assert dict(answer.report.misses) == {MISS_DAMAGED: 4}
    for key in keys(index)[:2]:
        index.store.delete(key)
    assert answer.text == engine.generate(prompt, ratio=0.5).text
