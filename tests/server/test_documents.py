"""Documents over HTTP: listed, uploaded, deleted, and refused."""

import errno
import json
import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from kvrag.chunk import Document
from kvrag.engine.engine import KVEngine
from kvrag.ingest import stages, writer
from kvrag.ingest.embedding import HashingEmbedding
from kvrag.ingest.index import Index
from kvrag.ingest.report import IngestProgress
from kvrag.server import documents, gate
from kvrag.server.access import ApiKey
from kvrag.server.app import ServerOptions, make_app
from kvrag.server.documents import Documents, uploads_path
from kvrag.server.history import History
from kvrag.server.running import Server
from tests.server.test_faults import metric, wait_until
from tests.support.api_server import Served, serving
from tests.support.rag import PASSAGES, make_index

TEXT = b"The lighthouse keeper of Varn feeds three grey geese at noon."


@pytest.fixture(scope="module")
def writable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("documents")
    with make_index(folder) as index:
        index.add([Document(source="ledger", text=PASSAGES["ledger"])])
        with serving(index, ServerOptions(can_upload=True)) as served:
            yield served


def put(served: Served, name: str, body: bytes, **options: Any) -> httpx.Response:
    where = f"{served.url}/kvrag/documents/{name}"
    return httpx.put(where, content=body, timeout=60, **options)


def steps(answer: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line) for line in answer.text.splitlines()]


def sources(served: Served) -> list[str]:
    listed = httpx.get(f"{served.url}/kvrag/documents").json()["documents"]
    return [one["source"] for one in listed]


def delete(served: Served, source: str) -> httpx.Response:
    return httpx.delete(f"{served.url}/kvrag/documents", params={"source": source}, timeout=60)


def test_a_document_is_added_found_and_deleted(writable: Served) -> None:
    answer = put(writable, "geese.md", TEXT)
    assert answer.status_code == 200
    assert steps(answer)[-1] == {"stage": "done", "num_chunks": 1}
    assert {"read", "compute"} <= {one["stage"] for one in steps(answer)}
    index = writable.engine.index
    path = uploads_path(index.path) / "geese.md"
    assert path.read_bytes() == TEXT
    assert sources(writable) == [str(path), "ledger"]
    assert index.search("three grey geese", 1)[0].chunk.source == str(path)
    # A second one of this name would replace it unseen.
    assert put(writable, "geese.md", TEXT).status_code == 409
    assert delete(writable, str(path)).json() == {"num_chunks": 1}
    assert not path.exists()
    assert sources(writable) == ["ledger"]
    assert delete(writable, str(path)).status_code == 404
    assert list(uploads_path(index.path).iterdir()) == []


@pytest.mark.parametrize(
    ("name", "body", "why"),
    [
        ("geese.exe", TEXT, "expected a file of the kinds"),
        (".hidden.md", TEXT, "no name of a file"),
        ("c%3Ad.md", TEXT, "no name of a file"),
        ("a%00b.md", TEXT, "no name of a file"),
        ("a%FFb.md", TEXT, "no name of a file"),
        ("empty.md", b"  ", "empty.md"),
        ("broken.pdf", b"no PDF", "broken.pdf"),
    ],
)
def test_what_is_refused(writable: Served, name: str, body: bytes, why: str) -> None:
    answer = put(writable, name, body)
    said = steps(answer)[-1]["error"]["message"] if answer.status_code == 200 else answer.text
    assert answer.status_code in (200, 400)
    assert why in said
    assert str(writable.engine.index.path.parent) not in said
    assert sources(writable) == ["ledger"]
    folder = uploads_path(writable.engine.index.path)
    assert not folder.exists() or list(folder.iterdir()) == []


def read_again(served: Served, source: str) -> httpx.Response:
    where = f"{served.url}/kvrag/documents"
    return httpx.post(where, params={"source": source}, timeout=60)


def test_a_file_is_read_again(writable: Served, tmp_path: Path) -> None:
    index, path = writable.engine.index, tmp_path / "geese.md"
    path.write_bytes(TEXT)
    table = tmp_path / "table.csv"
    table.write_text("name,place\nInes,Varn\nTomas,the tall clock\n")
    index.add([path, table])
    rows = [one for one in sources(writable) if one.startswith(str(table))]
    assert len(rows) == 2
    assert steps(read_again(writable, str(path)))[-1] == {"stage": "done", "num_chunks": 0}
    path.write_bytes(TEXT.replace(b"three grey", b"seven white"))
    assert steps(read_again(writable, str(path)))[-1] == {"stage": "done", "num_chunks": 1}
    assert "seven white" in index.search("geese", 1)[0].chunk.text
    table.write_text("name,place\nInes,Varn\nTomas,the low bridge\n")
    assert steps(read_again(writable, rows[0]))[-1]["num_chunks"] == 1
    listed = httpx.get(f"{writable.url}/kvrag/documents").json()["documents"]
    assert {one["source"]: one["is_file"] for one in listed} == {
        "ledger": False,
        str(path): True,
        **dict.fromkeys(rows, True),
    }
    path.unlink()
    gone = steps(read_again(writable, str(path)))[-1]["error"]
    assert "geese.md" in gone["message"]
    assert str(tmp_path) not in gone["message"]
    assert str(path) in sources(writable)  # the index keeps what it has read
    for source in (str(path), *rows):
        delete(writable, source)


def test_what_cannot_be_read_again(writable: Served, served: Served, tmp_path: Path) -> None:
    answer = read_again(writable, "ledger")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "not_a_file")
    (tmp_path / "secret.md").write_text("No index has read this.")
    for source in ("absent", "", str(tmp_path / "secret.md"), "/etc/passwd", "../x", "a#b"):
        assert read_again(writable, source).status_code == 404
    assert read_again(served, "ledger").status_code == 403
    assert sources(writable) == ["ledger"]
    evil = httpx.post(
        f"{writable.url}/kvrag/documents",
        params={"source": "ledger"},
        headers={"Origin": "https://evil.example"},
    )
    assert evil.json()["error"]["code"] == "wrong_origin"


def test_a_body_is_received_before_its_turn(writable: Served) -> None:
    """A slow one delays no other, and its name is taken meanwhile."""

    def slow() -> Iterator[bytes]:
        yield TEXT
        assert put(writable, "first.md", TEXT).status_code == 409
        assert steps(put(writable, "second.md", TEXT + b" Twice."))[-1]["stage"] == "done"
        yield TEXT

    answer = put(writable, "first.md", slow())  # type: ignore[arg-type]
    assert steps(answer)[-1]["stage"] == "done"
    folder = uploads_path(writable.engine.index.path)
    for name in ("first.md", "second.md"):
        assert delete(writable, str(folder / name)).json() == {"num_chunks": 1}
    assert list(folder.iterdir()) == []


def test_documents_take_turns(writable: Served) -> None:
    """One waits while another is added, and a delete is refused meanwhile."""
    folder = uploads_path(writable.engine.index.path)
    with held(writable) as (released, first), ThreadPoolExecutor() as threads:
        second = threads.submit(put, writable, "second.md", TEXT)
        while not list(folder.glob(".upload-*")):
            assert not second.done()
        refused = delete(writable, "ledger")
        assert (refused.status_code, refused.headers["Retry-After"]) == (503, "5")
        released.set()
        assert {"stage": "waiting"} in steps(second.result())
        assert steps(second.result())[-1]["stage"] == "done"
        assert steps(first.result())[-1]["stage"] == "done"
    for name in ("held.md", "second.md"):
        delete(writable, str(folder / name))
    assert sources(writable) == ["ledger"]


@contextmanager
def held(served: Served) -> Iterator[tuple[threading.Event, Future[httpx.Response]]]:
    """Hold an upload in the middle of its ingestion until the event is set."""
    released, reached = threading.Event(), threading.Event()
    embed = HashingEmbedding.embed

    def waiting(self: HashingEmbedding, texts: list[str]) -> Any:
        reached.set()
        assert released.wait(60)
        return embed(self, texts)

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor() as threads:
        patch.setattr(HashingEmbedding, "embed", waiting)
        answer = threads.submit(put, served, "held.md", TEXT * 2)
        try:
            assert reached.wait(60)
            yield released, answer
        finally:
            released.set()


def test_what_is_received_is_bounded(writable: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "_MAX_PENDING", 2)

    def slow() -> Iterator[bytes]:
        yield TEXT
        answer = put(writable, "second.md", TEXT)
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "5")
        yield TEXT

    assert put(writable, "first.md", slow()).status_code == 200  # type: ignore[arg-type]
    folder = uploads_path(writable.engine.index.path)
    delete(writable, str(folder / "first.md"))
    monkeypatch.setattr(gate.ParseLimits, "max_file_bytes", 1000)
    assert put(writable, "first.md", b"a" * 1001).status_code == 413
    assert list(folder.iterdir()) == []
    assert steps(put(writable, "first.md", TEXT))[-1]["stage"] == "done"
    delete(writable, str(folder / "first.md"))


def test_a_client_that_leaves_its_upload_is_no_error(
    writable: Served, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody can fill the log with tracebacks."""
    folder = uploads_path(writable.engine.index.path)
    with socket.create_connection(("127.0.0.1", writable.server.port), timeout=20) as client:
        client.sendall(
            b"PUT /v1/kvrag/documents/left.md HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Length: 100000\r\n\r\nx"
        )
        wait_until(lambda: any(folder.glob(".upload-*")))
    gone = 'kvrag_server_requests_total{route="/v1/kvrag/documents/{name}",status="499"'
    wait_until(lambda: metric(writable, gone) == 1)
    wait_until(lambda: not any(folder.glob(".upload-*")))
    assert put(writable, "left.md", TEXT).status_code == 200
    delete(writable, str(folder / "left.md"))
    assert not [one for one in caplog.records if one.levelname == "ERROR"]


ROWS = b"name,place\n" + b"".join(b"Ines %d,Varn near bridge %d\n" % (i, i) for i in range(12))


def test_the_last_row_takes_its_file_along(writable: Served) -> None:
    path = uploads_path(writable.engine.index.path) / "table.csv"
    assert steps(put(writable, "table.csv", ROWS))[-1]["num_chunks"] == 12
    rows = [one for one in sources(writable) if one.startswith(str(path))]
    for number, row in enumerate(rows):
        assert path.exists()
        assert delete(writable, row).json() == {"num_chunks": 1}, number
    assert not path.exists()
    assert steps(put(writable, "table.csv", ROWS))[-1]["num_chunks"] == 12
    for row in rows:
        delete(writable, row)
    assert sources(writable) == ["ledger"]


def test_what_is_not_in_the_index_deletes_no_file(writable: Served) -> None:
    folder = uploads_path(writable.engine.index.path)
    folder.mkdir(exist_ok=True)
    orphan = folder / "orphan.md"
    orphan.write_bytes(TEXT)
    for source in (
        *(str(orphan), f"{folder}/..", f"{folder}/.", str(folder), f"{folder}/" + "x" * 5000),
        *("\0", f"{folder}/a\0.md", "..", "/", ""),
    ):
        assert delete(writable, source).status_code == 404
    assert orphan.exists()
    # Its name is free: nothing of it is in the index.
    assert steps(put(writable, "orphan.md", TEXT))[-1]["stage"] == "done"
    assert delete(writable, str(orphan)).status_code == 200
    assert not orphan.exists()


def test_after_a_kill_the_same_name_is_accepted(
    writable: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the rows are in the index, and half of a body is on disk."""
    index = writable.engine.index
    folder = uploads_path(index.path)
    folder.mkdir(exist_ok=True)
    (folder / ".upload-left").write_bytes(b"half")
    (folder / "table.csv").write_bytes(ROWS)
    monkeypatch.setattr(stages, "COMMIT_TOKENS", 20)

    class KilledError(BaseException):
        pass

    def kill(progress: IngestProgress) -> None:
        if progress.num_documents_done > 2:
            raise KilledError

    with pytest.raises(KilledError):
        index.add([folder / "table.csv"], on_progress=kill)
    assert 1 < len(sources(writable)) < 13
    with serving(index, ServerOptions(can_upload=True), writable.engine) as again:
        assert [one.name for one in folder.iterdir()] == ["table.csv"]
        more = ROWS + b"Tomas,the low bridge\n"
        assert steps(put(again, "table.csv", more))[-1]["stage"] == "done"
        assert put(again, "table.csv", more).status_code == 409
        assert len(sources(again)) == 14
        for source in sources(again):
            if source != "ledger":
                delete(again, source)
        assert list(folder.iterdir()) == []


def test_a_document_of_which_a_part_fails_is_not_added(
    writable: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    embed = HashingEmbedding.embed

    def failing(self: HashingEmbedding, texts: list[str]) -> Any:
        if any("Ines 7" in text for text in texts):
            raise ValueError("no")
        return embed(self, texts)

    monkeypatch.setattr(HashingEmbedding, "embed", failing)
    answer = put(writable, "table.csv", ROWS)
    assert steps(answer)[-1]["error"]["code"] == "not_added"
    assert sources(writable) == ["ledger"]
    assert list(uploads_path(writable.engine.index.path).iterdir()) == []


def test_a_stop_ends_an_ingestion(tmp_path: Path) -> None:
    with make_index(tmp_path, chunk_tokens=20) as index:
        engine = KVEngine(index)
        app = make_app(engine, ServerOptions(can_upload=True))
        server = Server(app, port=0, grace_seconds=0)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        # More than is embedded at once.
        table = b"name\n" + b"".join(b"Ines %d\n" % number for number in range(100))
        embed, stopping = HashingEmbedding.embed, threading.Event()

        def waiting(self: HashingEmbedding, texts: list[str]) -> Any:
            reached.set()
            assert stopping.wait(60)
            return embed(self, texts)

        def stop(self: Documents) -> None:
            halt(self)
            stopping.set()

        reached, halt = threading.Event(), Documents.stop
        with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor() as threads:
            patch.setattr(HashingEmbedding, "embed", waiting)
            patch.setattr(Documents, "stop", stop)
            answer = threads.submit(put, Served(server, engine), "table.csv", table)
            assert reached.wait(60)
            server.stop()
            thread.join()
            last = steps(answer.result())[-1]
        assert "the server is stopping" in last["error"]["message"]
        assert index.documents() == []
        assert list(uploads_path(index.path).iterdir()) == []


def test_bytes_that_a_tenant_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [
        ApiKey(name=name, key=f"key-of-{name}-0123456789", kept_bytes=most)
        for name, most in (("a", 40_000), ("b", None))
    ]
    of_a, of_b = ({"Authorization": f"Bearer {one.key}"} for one in keys)
    turn = {"question": "a", "answer": "b" * 20_000, "finish": "stop", "settings": ""}
    told = {"title": "t", "turns": [turn | {"citations": []}]}
    with make_index(tmp_path) as index:
        options = ServerOptions(keys=keys, can_upload=True, keeps_history=True)
        with serving(index, options) as served:

            def keep(number: int, headers: dict[str, str]) -> httpx.Response:
                where = f"{served.url}/kvrag/conversations/{number:032x}"
                return httpx.put(where, json=told, headers=headers)

            assert keep(1, of_a).status_code == 507  # in words and in turns: over 40,000 bytes
            turn["answer"] = "b" * 10_000
            told["turns"] = [turn | {"citations": []}]
            assert keep(1, of_a).status_code == 200
            assert keep(1, of_a).status_code == 200  # in place of itself
            refused = keep(2, of_a)
            assert (refused.status_code, refused.json()["error"]["code"]) == (507, "storage_full")
            assert keep(2, of_b).status_code == 200
            assert put(served, "a.md", b"Ines. " * 4000, headers=of_a).status_code == 507
            assert list(uploads_path(index.path).glob("*/*")) == []
            # The same name in two tenants' folders; KV counts.
            for headers in (of_b, of_a):
                assert steps(put(served, "a.md", TEXT, headers=headers))[-1]["stage"] == "done"
            assert len(list(uploads_path(index.path).glob("*/a.md"))) == 2
            assert keep(1, of_a).status_code == 200
            documents = Documents(index, can_write=False)
            assert documents.kept_bytes("a") > len(TEXT)
            kv = {one.source: one.size_bytes for one in index.documents()}
            assert sum(kv.values()) == sum(documents.kept_bytes(t) - len(TEXT) for t in "ab")
            kept = documents.kept_bytes("a")
            (documents._folder_of("a") / "gone").symlink_to("nowhere")
            monkeypatch.setattr(Path, "is_file", lambda _: True)  # until it is deleted
            assert documents.kept_bytes("a") == kept


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = History.of

    def small(index: Index) -> History:
        history = opened(index)
        history._file.execute("PRAGMA max_page_count = 20")  # SQLite then says what a disk makes it
        return history

    monkeypatch.setattr(History, "of", small)
    turn = {"question": "a", "answer": "b" * 90_000, "finish": "stop", "settings": ""}
    told = {"title": "t", "turns": [turn | {"citations": []}]}
    with make_index(tmp_path) as index:
        options = ServerOptions(can_upload=True, keeps_history=True)
        with serving(index, options) as served:
            answers = [httpx.put(f"{served.url}/kvrag/conversations/{'0' * 32}", json=told)]

            def full(*_: Any, **__: Any) -> Any:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/secret")

            with monkeypatch.context() as patch:
                patch.setattr(tempfile, "mkstemp", full)
                answers.append(put(served, "a.md", TEXT))
            for answer in answers:
                assert answer.status_code == 507
                assert answer.json()["error"]["code"] == "disk_full"
                assert "secret" not in answer.text
            with monkeypatch.context() as patch:
                patch.setattr(writer.shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
                last = steps(put(served, "a.md", TEXT))[-1]
            assert last["error"]["code"] == "disk_full"
            assert list(uploads_path(index.path).iterdir()) == []
            assert steps(put(served, "a.md", TEXT))[-1]["stage"] == "done"


def test_a_server_that_takes_none(served: Served, tmp_path: Path) -> None:
    for refused in (put(served, "x.md", TEXT), delete(served, "ledger")):
        assert refused.status_code == 403
        assert "--allow-upload" in refused.text
    assert set(sources(served)) == set(PASSAGES)
    assert not uploads_path(served.engine.index.path).exists()
