"""What the referee's suites judge: a random model, and a file of questions over the same texts."""

import json
from pathlib import Path

import pytest

from kvrag.models.kv_model import KVModel
from kvrag_testing.bench_top import TEXTS
from tests.support.models import make_model, make_tokenizer


@pytest.fixture(scope="module")
def model() -> KVModel:
    return KVModel(make_model(), make_tokenizer(), name="random")


@pytest.fixture
def questions(tmp_path: Path) -> str:
    """Two questions in MuSiQue's layout."""
    path = tmp_path / "set.json"
    ctxs = [{"title": "", "text": text} for text in TEXTS]
    asked = [{"question": f"who keeps {i}?", "answers": ["Ines"], "ctxs": ctxs} for i in range(2)]
    path.write_text(json.dumps(asked))
    return str(path)
