"""`ObjectStore` against a real server of Amazon's protocol."""

from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from kvrag.chunk import ChunkKey
from kvrag.errors import ParameterError, StoreError, StoreUnreachableError
from kvrag.store.base import Store
from kvrag.store.objects import ObjectStore
from kvrag_testing.store_contract import StoreContract, key_number, read_all, record_of, stored
from tests.support.servers import S3Server, answering, free_port, reply

KEY = key_number(0)
BUCKET = "kvrag-tests"


@pytest.fixture
def client(s3_server: S3Server, s3_credentials: None) -> Iterator[Any]:
    with s3_server.bucket(BUCKET) as client:
        yield client


@pytest.fixture
def store(client: Any, s3_server: S3Server) -> ObjectStore:
    return ObjectStore(f"s3://{BUCKET}/a/b", endpoint=s3_server.endpoint)


def name_of(key: ChunkKey) -> str:
    return f"a/b/{key.digest[:2]}/{key.digest}.kv"


class TestObjectStore(StoreContract):
    keeps_old = False

    @pytest.fixture
    def store(self, store: ObjectStore) -> ObjectStore:
        return store

    @pytest.fixture(autouse=True)
    def _client(self, client: Any) -> None:
        self.client = client

    def plant(self, store: Store, key: ChunkKey, record: bytes) -> None:
        self.client.put_object(Bucket=BUCKET, Key=name_of(key), Body=record)

    def peek(self, store: Store, key: ChunkKey) -> bytes:
        with self.client.get_object(Bucket=BUCKET, Key=name_of(key))["Body"] as body:
            return bytes(body.read())


def test_foreign_objects_are_left_alone(store: ObjectStore, client: Any) -> None:
    store.put(KEY, b"record")
    foreign = ["a/b/notes.txt", f"a/b/{KEY}.kv", f"a/b/zz/{KEY}.kv", f"other/{name_of(KEY)}"]
    for name in foreign:
        client.put_object(Bucket=BUCKET, Key=name, Body=b"foreign")
    assert list(store.keys()) == [KEY]
    assert store.collect_garbage(0.0) == 0
    assert store.delete(KEY)
    names = [found["Key"] for found in client.list_objects_v2(Bucket=BUCKET)["Contents"]]
    assert sorted(names) == sorted(foreign)


def test_the_rest_of_an_object_that_was_replaced_is_refused(store: ObjectStore) -> None:
    store.put(KEY, record_of(KEY, 100_000))
    record = store.open(KEY)
    store.replace(KEY, bytes(100_000))
    with pytest.raises(StoreError, match="deleted or replaced since it was opened"):
        read_all(record)


def test_a_missing_bucket(s3_server: S3Server, s3_credentials: None) -> None:
    with pytest.raises(StoreError, match="there is no such bucket; make it"):
        ObjectStore("s3://nobody-made-this", endpoint=s3_server.endpoint)


def test_nobody_there(s3_credentials: None) -> None:
    endpoint = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(StoreUnreachableError, match="check the endpoint"):
        ObjectStore("s3://bucket", endpoint=endpoint, timeout_seconds=0.3)


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
def test_the_environment_names_an_endpoint_without_tls(
    s3_server: S3Server, s3_credentials: None, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, s3_server.endpoint)
    with pytest.raises(StoreError, match="there is no such bucket"):
        ObjectStore("s3://nobody-made-this")


@pytest.mark.parametrize("url", ["s3://", "s3:///prefix", "ftp://bucket/x", "s3:bucket", "bucket"])
def test_bad_urls(url: str) -> None:
    with pytest.raises(ParameterError):
        ObjectStore(url)


@pytest.mark.parametrize(
    "endpoint", ["foo", "", "ftp://host", "http://", "http://a b", "http://h:port", "http://["]
)
def test_what_is_no_endpoint_is_refused_before_the_library_panics(endpoint: str) -> None:
    with pytest.raises(ParameterError, match="endpoint is http://HOST:PORT"):
        ObjectStore("s3://bucket/x", endpoint=endpoint)


def test_a_missing_account_is_one_line_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ParameterError, match="AZURE_STORAGE_ACCOUNT_NAME") as failure:
        ObjectStore("az://container/x")
    assert "Debug source" not in str(failure.value)


@pytest.mark.parametrize("url", ["gs://bucket/x", "az://container/x"])
def test_other_providers_are_asked_under_their_own_protocol(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without their servers at hand: what is sent to an endpoint, and what a refusal becomes."""
    asked: list[str] = []
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "a2V5")
    monkeypatch.setenv("GOOGLE_SKIP_SIGNATURE", "true")

    def refuse(handler: BaseHTTPRequestHandler) -> None:
        asked.append(handler.path)
        handler.send_error(403)

    with answering(refuse) as endpoint, pytest.raises(StoreError, match=r"access is refused.*set "):
        ObjectStore(url, endpoint=endpoint)
    assert any(("bucket" in path or "container" in path) for path in asked)


def test_a_clock_that_is_wrong(s3_credentials: None) -> None:
    wrong = partial(reply, status=403, body=b"<Error><Code>RequestTimeTooSkewed</Code></Error>")
    with answering(wrong) as endpoint, pytest.raises(StoreError, match=r"the clock of .*; set it"):
        ObjectStore("s3://bucket", endpoint=endpoint)


@pytest.mark.parametrize("status", [500, 503])
def test_a_server_that_fails(s3_credentials: None, status: int) -> None:
    """Listing works, so the store opens; what comes then is an error in time."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        is_list = "list-type" in handler.path
        body = b'<?xml version="1.0"?><ListBucketResult></ListBucketResult>'
        reply(handler, 200 if is_list else status, body)

    with answering(answer) as endpoint:
        store = ObjectStore("s3://bucket", endpoint=endpoint, timeout_seconds=0.4)
        with pytest.raises(StoreUnreachableError):
            stored(store, KEY)
        assert store.counts()[0].misses == {"unreadable": 1}
