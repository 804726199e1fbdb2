"""Conversations that the server keeps: over HTTP, and their file."""

import os
import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvrag.errors import ParameterError, StoreError
from kvrag.server import history as module
from kvrag.server.access import ApiKey
from kvrag.server.app import ServerOptions
from kvrag.server.history import History, history_path
from tests.support.api_server import Served, serving
from tests.support.folders import key_file
from tests.support.rag import Rag, make_index

ONE, TWO = "1" * 32, "2" * 32
KEYS = {
    "ada": "key-of-ada-0123456789",
    "ben": "key-of-ben-0123456789",
    "cyd": "key-of-cyd-01234567",
}
TENANTS = {"ada": "north", "ben": "north", "cyd": "south"}


def turn(question: str, answer: str = "Ines.") -> dict[str, Any]:
    return {
        "question": question,
        "answer": answer,
        "finish": "stop",
        "settings": "query",
        "options": None,
        "citations": [],
        "details": None,
        "rating": "good",
    }


@pytest.fixture(scope="module")
def kept(rag: Rag) -> Iterator[Served]:
    keys = [ApiKey(name=name, key=KEYS[name], tenant=TENANTS[name]) for name in KEYS]
    with serving(rag.index, ServerOptions(keys=keys, keeps_history=True)) as served:
        yield served


def client(served: Served, name: str) -> httpx.Client:
    return httpx.Client(
        base_url=f"{served.url}/kvrag/conversations",
        headers={"Authorization": f"Bearer {KEYS[name]}"},
        timeout=30,
    )


def titles(http: httpx.Client, search: str = "") -> list[str]:
    where = str(http.base_url).rstrip("/")
    listed = http.get(where, params={"search": search}).json()["conversations"]
    return [one["title"] for one in listed]


def test_a_conversation_from_its_first_question_to_its_end(kept: Served) -> None:
    with client(kept, "ada") as ada, client(kept, "ben") as ben, client(kept, "cyd") as cyd:
        body = {"title": "The ledger", "turns": [turn("Who keeps the 100% ledger?")]}
        assert ada.put(ONE, json=body).status_code == 200
        assert ada.put(TWO, json={"title": "Clocks", "turns": [turn("Which?")]}).status_code == 200
        assert titles(ada) == titles(ben) == ["Clocks", "The ledger"]
        assert titles(ada, "LEDGER") == titles(ada, "100%") == ["The ledger"]
        assert titles(ada, "ines") == ["Clocks", "The ledger"]
        assert titles(ada, "%") == ["The ledger"]
        assert titles(ada, "_") == []
        assert ada.get(ONE).json()["turns"] == body["turns"]
        # Another tenant sees nothing of it, and changes nothing.
        assert titles(cyd) == []
        assert cyd.get(ONE).status_code == cyd.delete(ONE).status_code == 404
        assert cyd.patch(ONE, json={"title": "Mine"}).status_code == 404
        cyd.put(ONE, json={"title": "Mine", "turns": [turn("?")]})
        assert ada.get(ONE).json()["title"] == "The ledger"
        assert ben.patch(ONE, json={"title": "Ships"}).status_code == 200
        assert titles(ada) == ["Clocks", "Ships"]
        assert ben.delete(ONE).status_code == 200
        assert ada.get(ONE).status_code == 404


def test_the_file_is_private_and_bounded(
    rag: Rag, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "conversations.sqlite"
    monkeypatch.setattr(module, "MAX_CONVERSATIONS", 3)
    history = History(path)
    for number in range(5):
        history.put("a", f"{number}", f"title {number}", [turn("secret ingredient")])
    history.put("b", "0", "other", [turn("?")])
    assert [one["title"] for one in history.find("a")] == ["title 4", "title 3", "title 2"]
    assert len(history.find("b")) == 1
    if os.name == "posix":
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for one in history.find("a"):
        assert history.delete("a", one["id"])
    history.close()
    assert b"secret ingredient" not in path.read_bytes()
    with pytest.raises(StoreError, match="closed"):
        history.find("a")


def test_a_clock_that_goes_back_loses_no_conversation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_CONVERSATIONS", 2)
    history = History(tmp_path / "h.sqlite")
    for number, now in enumerate((5000.0, 6000.0, 1000.0, 900.0)):
        monkeypatch.setattr("time.time", lambda now=now: now)
        history.put("north", str(number), f"t{number}", [turn("a")])
        assert next(one["id"] for one in history.find("north")) == str(number)
    assert [one["title"] for one in history.find("north")] == ["t3", "t2"]
    history.close()


def test_a_file_of_an_earlier_version_keeps_its_order(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "h.sqlite") as file:
        file.execute(
            "CREATE TABLE conversations (tenant TEXT NOT NULL, id TEXT NOT NULL, title TEXT NOT "
            "NULL, updated REAL NOT NULL, words TEXT NOT NULL, turns TEXT NOT NULL, "
            "PRIMARY KEY (tenant, id)) WITHOUT ROWID"
        )
        rows = [("n", name, name, when, "", "[]") for name, when in (("b", 2.0), ("a", 1.0))]
        file.executemany("INSERT INTO conversations VALUES (?, ?, ?, ?, ?, ?)", rows)
    file.close()
    for _ in range(2):
        history = History(tmp_path / "h.sqlite")
        assert [one["id"] for one in history.find("n")] == ["b", "a"]
        history.close()
    history = History(tmp_path / "h.sqlite")
    history.put("n", "a", "a", [turn("again")])
    assert [one["id"] for one in history.find("n")] == ["a", "b"]
    history.close()


def test_a_damaged_file_and_a_missing_folder(tmp_path: Path) -> None:
    path = tmp_path / "conversations.sqlite"
    path.write_bytes(b"no database " * 100)
    for where in (path, tmp_path / "absent" / "conversations.sqlite"):
        with pytest.raises(ParameterError, match="--no-history"):
            History(where)


def test_an_encrypted_index_has_encrypted_conversations(tmp_path: Path) -> None:
    pytest.importorskip("sqlcipher3")
    pytest.importorskip("cryptography")
    key = key_file(tmp_path / "key")
    with make_index(tmp_path, store=f"file:records?key_file={key}") as index:
        history = History.of(index)
        history.put("", ONE, "title", [turn("secret ingredient")])
        history.close()
        path = history_path(index.path)
        assert path.parent == tmp_path
        content = path.read_bytes()
        assert b"secret" not in content
        assert not content.startswith(b"SQLite")
        with pytest.raises(sqlite3.DatabaseError):
            sqlite3.connect(path).execute("SELECT * FROM conversations")
        again = History.of(index)
        assert again.find("")[0]["title"] == "title"
        again.close()
