"""`kvrag bench retrieval`: recall is counted on known rankings, and the table is printed."""

import json
from pathlib import Path

import pytest

from kvrag_bench.retrieval import RetrievalOptions, RetrievalRow, run_retrieval_bench

RECORDS = [
    {
        "question": "Who keeps the harbour ledger?",
        "answers": ["Ines"],
        "ctxs": [
            {"title": "", "text": "Ines keeps the harbour ledger of Varn."},
            {"title": "", "text": "Tomas repairs the tall clock."},
        ],
    },
    {
        "question": "Which zebra?",  # no word of it, and no letter, is in the wanted text
        "answers": ["clock"],
        "ctxs": [{"title": "", "text": "Tomas repairs the tall clock."}],
    },
    {  # its answer is in none of its own texts
        "question": "Where is the clock?",
        "answers": ["Ines"],
        "ctxs": [{"title": "", "text": "Tomas repairs the tall clock."}],
    },
]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "asked.json"
    path.write_text(json.dumps(RECORDS))
    return path


def rows_of(data: Path, **options: object) -> dict[str, RetrievalRow]:
    chosen = RetrievalOptions(
        data=(str(data),), model="kvrag-tiny", embedding="hashing", chunk_tokens=(64,), **options
    )
    return {row.way: row for row in run_retrieval_bench(chosen)}


def test_recall_is_counted(data: Path) -> None:
    rows = rows_of(data)
    assert list(rows) == ["dense", "sparse", "hybrid"]
    for row in rows.values():
        assert (row.data, row.num_questions, row.num_chunks) == ("asked", 2, 2)
        assert row.tails == 1.0
    # Words find nothing for the second question; vectors find every chunk.
    assert (rows["sparse"].recall_4, rows["sparse"].recall_10, rows["sparse"].mrr) == (0.5,) * 3
    assert rows["dense"].recall_4 == rows["hybrid"].recall_4 == 1.0
    assert rows["hybrid"].mrr >= max(rows["dense"].mrr, rows["sparse"].mrr)
