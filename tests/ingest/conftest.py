"""A tiny model, and indexes made with it."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvrag.ingest.index import Index
from kvrag.models.kv_model import KVModel
from kvrag_testing.store_contract import stored
from tests.support.models import make_model, make_tokenizer

MakeIndex = Callable[..., Index]
Machine = Callable[..., Index]


@pytest.fixture(scope="session")
def model() -> KVModel:
    return KVModel.load(make_model("llama", num_hidden_layers=2), tokenizer=make_tokenizer())


@pytest.fixture
def make_index(tmp_path: Path, model: KVModel) -> Iterator[MakeIndex]:
    """Make indexes in folders of their own, closed at the end of the test."""
    with ExitStack() as stack:

        def make(name: str = "index", **settings: Any) -> Index:
            chosen = {"model": model, "embedding": "hashing", "chunk_tokens": 64, **settings}
            return stack.enter_context(Index.create(tmp_path / name, **chosen))

        yield make


@pytest.fixture
def index(make_index: MakeIndex) -> Index:
    return make_index()


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    """A folder of three files."""
    folder = tmp_path / "docs"
    (folder / "deep").mkdir(parents=True)
    (folder / "ledger.txt").write_text("Ines keeps the harbour ledger of Varn.")
    (folder / "clock.md").write_text("# The clock\n\nTomas repairs the tall clock of Varn.\n")
    (folder / "deep" / "fox.txt").write_text("The quick brown fox jumps over the lazy dog.")
    return folder


def stored_bytes(index: Index) -> dict[str, bytes]:
    """Return every record of the store, by the digits of its key."""
    return {key.digest: stored(index.store, key) or b"" for key in sorted(index.store.keys())}


@pytest.fixture
def folder_url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/bucket/index"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: KVModel) -> Iterator[Machine]:
    """Open or create an index as one of several machines, by the machine's name."""
    with ExitStack() as stack:

        def at(name: str, url: str, **settings: Any) -> Index:
            monkeypatch.setenv("KVRAG_VIEWS", str(tmp_path / "machines" / name))
            if settings:
                chosen = {"model": model, "embedding": "hashing", "chunk_tokens": 64, **settings}
                return stack.enter_context(Index.create(url, **chosen))
            return stack.enter_context(Index.open(url, model=model))

        yield at
