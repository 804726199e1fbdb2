"""Indexes over small random models, one for each way of having positions."""

import functools
from collections.abc import Iterator

import pytest

from kvrag.engine.engine import KVEngine
from kvrag.ingest.index import Index
from kvrag.models.kv_model import KVModel
from kvrag.pml.engine import PMLEngine
from tests.support.models import make_model, make_tokenizer


@functools.cache
def model_of(family: str) -> KVModel:
    return KVModel(make_model(family), make_tokenizer())


@pytest.fixture(params=["llama", "bloom", "gpt2"])
def pml(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    folder = tmp_path_factory.mktemp("pml") / "index"
    with Index.create(folder, model=model_of(request.param), embedding="hashing") as index:
        yield PMLEngine(KVEngine(index))
