"""Documents over HTTP: listed, uploaded, deleted, and refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvrag.chunk import Document
from kvrag.ingest.index import Index
from kvrag.server import gate
from kvrag.server.app import ServerOptions
from kvrag.server.documents import uploads_path
from tests.support.api_server import Served, serving
from tests.support.rag import PASSAGES, save_model

TEXT = b"The lighthouse keeper of Varn feeds three grey geese at noon."


@pytest.fixture(scope="module")
def writable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("documents")
    save_model(folder / "model")
    with Index.create(folder / "index", model=folder / "model", embedding="hashing") as index:
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
        ("a%5Cb.md", TEXT, "no name of a file"),
        ("c%3Ad.md", TEXT, "no name of a file"),
        ("a%0Ab.md", TEXT, "no name of a file"),
        ("n" * 201 + ".md", TEXT, "200"),
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


def test_a_path_is_no_name(writable: Served) -> None:
    for name in ("..%2Fmodel%2Fx.md", "%2e%2e%2fx.md", "a/b.md"):
        assert put(writable, name, TEXT).status_code in (400, 404, 405)
    assert sources(writable) == ["ledger"]


def test_a_large_file_is_refused(writable: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate.ParseLimits, "max_file_bytes", 1000)
    assert put(writable, "large.md", b"a" * 1001).status_code == 413
    assert sources(writable) == ["ledger"]
    assert list(uploads_path(writable.engine.index.path).iterdir()) == []


def test_one_at_a_time(writable: Served) -> None:
    def slow() -> Iterator[bytes]:
        yield TEXT
        answer = put(writable, "second.md", TEXT)
        assert answer.status_code == 503
        assert answer.headers["Retry-After"] == "5"
        yield TEXT

    answer = put(writable, "first.md", slow())  # type: ignore[arg-type]
    assert steps(answer)[-1]["stage"] == "done"
    delete(writable, str(uploads_path(writable.engine.index.path) / "first.md"))


def test_pages_of_other_sites_change_nothing(writable: Served) -> None:
    evil = {"Origin": "https://evil.example"}
    assert put(writable, "x.md", TEXT, headers=evil).status_code == 403
    where = f"{writable.url}/kvrag/documents"
    refused = httpx.delete(where, params={"source": "ledger"}, headers=evil)
    assert refused.json()["error"]["code"] == "wrong_origin"
    assert sources(writable) == ["ledger"]


def test_a_server_that_takes_none(served: Served, tmp_path: Path) -> None:
    for refused in (put(served, "x.md", TEXT), delete(served, "ledger")):
        assert refused.status_code == 403
        assert "--allow-upload" in refused.text
    assert set(sources(served)) == set(PASSAGES)
    assert not uploads_path(served.engine.index.path).exists()
