"""Contract 1: the order in which chunks are indexed never changes stored bytes."""

import random
from typing import Any

import pytest

from kvrag.chunk import Document
from kvrag.models.kv_model import KVModel
from tests.ingest.conftest import MakeIndex, stored_bytes
from tests.support.models import make_model, make_tokenizer

WORDS = "the keeper of northern light wrote a book about ships in harbour fox dog river".split()  # noqa: SIM905


def documents(seed: int) -> list[Document]:
    """Documents of 1 to some 150 tokens, so that every batch would be padded."""
    chance = random.Random(seed)
    return [
        Document(f"d{i}", f"{i} " + " ".join(chance.choices(WORDS, k=chance.randint(1, 50))))
        for i in range(6)
    ]


@pytest.mark.parametrize(
    ("family", "context", "chunk_tokens"),
    [
        ("llama", "none", 128),
        ("mistral-sliding", "document", 32),
        ("llama", "neighbours", 32),
        ("llama", "filler:40", 128),
    ],
)
def test_order_and_grouping_never_change_stored_bytes(
    make_index: MakeIndex,
    family: str,
    context: str,
    chunk_tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings: dict[str, Any] = {"context": context, "chunk_tokens": chunk_tokens}
    model = KVModel.load(make_model(family, num_hidden_layers=2), tokenizer=make_tokenizer())
    given = documents(1)
    at_once = make_index("at-once", model=model, **settings)
    at_once.add(given)
    expected = stored_bytes(at_once)
    assert len(expected) >= len(given)

    shuffled = make_index("shuffled", model=model, **settings)
    shuffled.add(random.Random(2).sample(given, len(given)))
    assert stored_bytes(shuffled) == expected

    one_by_one = make_index("one-by-one", model=model, **settings)
    for document in reversed(given):
        one_by_one.add(document)
    assert stored_bytes(one_by_one) == expected

    monkeypatch.setattr("kvrag.ingest.stages.COMMIT_TOKENS", 100)
    windows = make_index("windows", model=model, **settings)
    windows.add([given[3:], given[:6]])
    assert stored_bytes(windows) == expected

    # Recomputed after damage, a record is again what it was.
    key = next(iter(windows.store.keys()))
    windows.store.delete(key)
    assert windows.upkeep.verify(repair=True).ok
    assert stored_bytes(windows) == expected
