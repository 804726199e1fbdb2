from collections.abc import Iterator

import pytest
from openai import OpenAI

from kvrag.engine.engine import KVEngine
from tests.support.api_server import Served, serving
from tests.support.rag import Rag, rag

__all__ = ["rag"]


@pytest.fixture(scope="session")
def served(rag: Rag) -> Iterator[Served]:
    """A server over the index of `PASSAGES`, without keys, for tests that have no order."""
    with serving(rag.index, engine=KVEngine(rag.index, max_tokens=16, session_bytes=0)) as running:
        yield running


@pytest.fixture
def client(served: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=served.url, api_key="none needed", max_retries=0) as opened:
        yield opened
