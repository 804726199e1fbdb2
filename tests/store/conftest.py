"""Servers, started when the first test needs them."""

from collections.abc import Iterator

import pytest

from tests.support.servers import PASSWORD, RedisServer


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@pytest.fixture
def redis_password(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("KVRAG_REDIS_PASSWORD", PASSWORD)
    return PASSWORD
