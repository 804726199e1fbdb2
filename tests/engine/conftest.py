"""One small index for all engine tests."""

from collections.abc import Iterator

import pytest

from kvrag.chunk import Document
from kvrag.ingest.index import Index
from kvrag.models.kv_model import KVModel
from kvrag_testing.bench_top import TEXTS
from tests.support.models import make_model, make_tokenizer


@pytest.fixture(scope="session")
def model() -> KVModel:
    return KVModel(make_model(), make_tokenizer())


@pytest.fixture(scope="session")
def index(tmp_path_factory: pytest.TempPathFactory, model: KVModel) -> Iterator[Index]:
    folder = tmp_path_factory.mktemp("engine") / "index"
    with Index.create(folder, model=model, embedding="hashing") as index:
        index.add([Document(source=f"text-{i}", text=text) for i, text in enumerate(TEXTS)])
        yield index
