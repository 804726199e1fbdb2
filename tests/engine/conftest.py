"""One small index for all engine tests."""

from collections.abc import Iterator

import pytest

from kvrag.ingest.index import Index
from kvrag.models.kv_model import KVModel
from tests.support.models import make_model, make_tokenizer
from tests.support.rag import text_index


@pytest.fixture(scope="session")
def model() -> KVModel:
    return KVModel(make_model(), make_tokenizer())


@pytest.fixture(scope="session")
def index(tmp_path_factory: pytest.TempPathFactory, model: KVModel) -> Iterator[Index]:
    folder = tmp_path_factory.mktemp("engine") / "index"
    with text_index(folder, model) as index:
        yield index
