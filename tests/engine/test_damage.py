"""Contract 2: damaged or missing KV becomes plain prefill, counted, never wrong, never raised."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrag.chunk import Document
from kvrag.engine.engine import MISS_CATALOG, KVEngine
from kvrag.errors import IndexFormatError
from kvrag.fusion.loader import MISS_ABSENT, MISS_DAMAGED
from kvrag.ingest.index import Index
from kvrag.models.kv_model import KVModel
from tests.support.bench_top import TEXTS
from tests.support.models import make_model, make_tokenizer

PROMPT = "Context:\n\n" + "\n\n".join(TEXTS) + "\n\nQuestion: who keeps it?\nAnswer:"


def records(folder: Path) -> list[Path]:
    return sorted(p for p in (folder / "kv").rglob("*") if p.is_file() and p.stat().st_size > 4000)


@pytest.fixture
def index(tmp_path: Path) -> Index:
    model = KVModel(make_model(), make_tokenizer())
    index = Index.create(tmp_path / "index", model=model, embedding="hashing")
    index.add([Document(source=f"text-{i}", text=text) for i, text in enumerate(TEXTS)])
    return index


def check_counted(index: Index, reason: str) -> None:
    engine = KVEngine(index, max_tokens=8)
    answer = engine.generate(PROMPT, ratio=1.0)
    assert dict(answer.report.misses) == {reason: 1}
    assert answer.report.num_chunks == len(TEXTS) - 1
    assert answer.text == engine.generate(PROMPT, reuse=False).text
    report = answer.report
    counted = report.num_exact + report.num_reused + report.num_recomputed + report.num_fresh
    assert counted == report.num_tokens


def test_a_missing_record(index: Index) -> None:
    records(index.path)[0].unlink()
    check_counted(index, MISS_ABSENT)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.99])
def test_a_flipped_bit(index: Index, share: float) -> None:
    record = records(index.path)[1]
    damaged = bytearray(record.read_bytes())
    damaged[int(share * len(damaged))] ^= 0x10
    record.write_bytes(damaged)
    check_counted(index, MISS_DAMAGED)


@pytest.mark.parametrize("share", [0.0, 0.5, 0.999])
def test_a_truncated_record(index: Index, share: float) -> None:
    record = records(index.path)[2]
    whole = record.read_bytes()
    record.write_bytes(whole[: int(share * len(whole))])
    check_counted(index, MISS_DAMAGED)


def test_a_record_of_another_chunk(index: Index) -> None:
    first, second, *_ = records(index.path)
    first.write_bytes(second.read_bytes())
    check_counted(index, MISS_DAMAGED)


def test_two_damaged_records_and_a_repeated_chunk(index: Index) -> None:
    for record in records(index.path)[:2]:
        damaged = bytearray(record.read_bytes())
        damaged[-100] ^= 0x10
        record.write_bytes(damaged)
    engine = KVEngine(index, max_tokens=8)
    prompt = "\n\n".join([*TEXTS, *TEXTS, "Question: who keeps it?\nAnswer:"])
    answer = engine.generate(prompt, ratio=1.0)
    assert dict(answer.report.misses) == {MISS_DAMAGED: 4}
    assert answer.text == engine.generate(prompt, reuse=False).text


def test_a_catalog_that_cannot_be_read(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise IndexFormatError("catalog.sqlite is damaged")

    monkeypatch.setattr(index, "get_chunks", refuse)
    engine = KVEngine(index, max_tokens=8)
    answer = engine.generate(PROMPT)
    assert dict(answer.report.misses) == {MISS_CATALOG: 1}
    assert answer.report.num_fresh == answer.report.num_tokens
    assert answer.text == engine.generate(PROMPT, reuse=False).text
