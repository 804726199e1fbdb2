"""Conversations of the page, in one SQLite file beside the index, and their routes.

Each is for its tenant alone.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from fastapi import FastAPI, Query, Request
from fastapi import Path as InPath
from pydantic import Field, field_validator

from kvrag import arguments
from kvrag.errors import ParameterError, StoreError
from kvrag.ingest.encryption import conversations_key
from kvrag.ingest.index import Index
from kvrag.server import responses as r
from kvrag.server.problems import RequestError
from kvrag.server.requests import Object, Strict
from kvrag.server.service import Service, record_of
from kvrag.sqlitefile import connect, library

MAX_CONVERSATIONS = 1000
"""Most conversations of a tenant; the oldest one makes room for the next."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS conversations (
    tenant TEXT NOT NULL,
    id TEXT NOT NULL,
    title TEXT NOT NULL,
    updated REAL NOT NULL,
    words TEXT NOT NULL,
    turns TEXT NOT NULL,
    place INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (tenant, id)
) WITHOUT ROWID
"""
# Files of earlier versions have no places: the order was that of the clock, which may go back.
_ADD_PLACES = (
    "ALTER TABLE conversations ADD COLUMN place INTEGER NOT NULL DEFAULT 0",
    "UPDATE conversations SET place = (SELECT COUNT(*) FROM conversations AS earlier "
    "WHERE earlier.updated <= conversations.updated)",
)


def history_path(index: Path) -> Path:
    """Return the file of an index's conversations.

    It is outside the index's folder: who copies an index for others copies no conversations.
    """
    return index.with_name(f"{index.name}.conversations.sqlite")


class History:
    """Reads and writes conversations; any thread may use it.

    Parameters
    ----------
    path
        The file; made if it is missing, and readable by this user alone.
    key
        The 32 bytes that it is encrypted with; None for a plain file.

    Raises
    ------
    ParameterError
        When the file cannot be used.
    """

    def __init__(self, path: Path, key: bytes | None = None) -> None:
        self._path = path
        self._sql = library(key)
        self._lock = threading.Lock()
        try:
            # SQLite would let others read what it creates.
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
            self._file, _ = connect(path, key)
            self._file.row_factory = self._sql.Row
            self._file.execute(_SCHEMA)
            columns = self._file.execute("PRAGMA table_info(conversations)").fetchall()
            if "place" not in [column[1] for column in columns]:
                for statement in _ADD_PLACES:
                    self._file.execute(statement)
        except (OSError, self._sql.Error) as error:
            why = getattr(error, "strerror", None) or error
            raise ParameterError(
                f"cannot keep conversations in {path}: {why}; move the file away, or serve with "
                "--no-history"
            ) from error

    @classmethod
    def of(cls, index: Index) -> History:
        """Open the conversations beside an index, encrypted if the index is."""
        return cls(history_path(index.path), conversations_key(index.store))

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._file.close()

    def find(self, tenant: str, search: str = "") -> list[dict[str, Any]]:
        """Return a tenant's conversations, the latest first: ``id``, ``title``, ``updated``.

        Parameters
        ----------
        tenant
            Whose.
        search
            What the title, a question or an answer contains.
        """
        escaped = search.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
        with self._using() as file:
            rows = file.execute(
                "SELECT id, title, updated FROM conversations WHERE tenant = ? "
                "AND (title LIKE ? ESCAPE '\\' OR words LIKE ? ESCAPE '\\') ORDER BY place DESC",
                (tenant, f"%{escaped}%", f"%{escaped}%"),
            ).fetchall()
        return [dict(row) for row in rows]

    def get(self, tenant: str, conversation: str) -> dict[str, Any] | None:
        """Return a conversation with its ``turns``; None if the tenant has none of this id."""
        with self._using() as file:
            row = file.execute(
                "SELECT id, title, updated, turns FROM conversations WHERE tenant = ? AND id = ?",
                (tenant, conversation),
            ).fetchone()
        return None if row is None else {**dict(row), "turns": json.loads(row["turns"])}

    def put(
        self, tenant: str, conversation: str, title: str, turns: Sequence[Mapping[str, Any]]
    ) -> None:
        """Write a conversation in place of what has its id."""
        row = (tenant, conversation, title, time.time(), *_packed(turns))
        with self._using() as file:
            file.execute(
                "INSERT OR REPLACE INTO conversations SELECT ?, ?, ?, ?, ?, ?, "
                "1 + COALESCE(MAX(place), 0) FROM conversations",
                row,
            )
            file.execute(
                "DELETE FROM conversations WHERE tenant = ? AND id IN (SELECT id FROM "
                "conversations WHERE tenant = ? ORDER BY place DESC LIMIT -1 OFFSET ?)",
                (tenant, tenant, MAX_CONVERSATIONS),
            )

    def kept_bytes(self, tenant: str, conversation: str | None = None) -> int:
        """Return the bytes of a tenant's conversations, or of one of them."""
        with self._using() as file:
            (num_bytes,) = file.execute(
                "SELECT COALESCE(SUM(LENGTH(CAST(words || turns AS BLOB))), 0) FROM conversations "
                "WHERE tenant = ? AND (? IS NULL OR id = ?)",
                (tenant, conversation, conversation),
            ).fetchone()
        return int(num_bytes)

    def growth(self, tenant: str, conversation: str, turns: Sequence[Mapping[str, Any]]) -> int:
        """Return how many more bytes `put` would keep."""
        new = sum(len(one.encode("utf-8", "surrogatepass")) for one in _packed(turns))
        return new - self.kept_bytes(tenant, conversation)

    def rename(self, tenant: str, conversation: str, title: str) -> bool:
        """Set a title; return whether there is such a conversation."""
        with self._using() as file:
            done = file.execute(
                "UPDATE conversations SET title = ? WHERE tenant = ? AND id = ?",
                (title, tenant, conversation),
            )
        return bool(done.rowcount)

    def delete(self, tenant: str, conversation: str) -> bool:
        """Delete a conversation, also its bytes; return whether there was one."""
        with self._using() as file:
            file.execute("PRAGMA secure_delete = ON")
            done = file.execute(
                "DELETE FROM conversations WHERE tenant = ? AND id = ?", (tenant, conversation)
            )
        return bool(done.rowcount)

    @contextmanager
    def _using(self) -> Iterator[Any]:
        with self._lock:
            try:
                yield self._file
            except self._sql.Error as error:
                raise StoreError(f"cannot use {self._path}: {error}") from error


def _packed(turns: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Return the text in which conversations are searched, and the turns as JSON."""
    words = "\n".join(f"{turn['question']}\n{turn['answer']}" for turn in turns)
    return words, json.dumps(list(turns))


T = TypeVar("T")

_MOST_TURNS = 200
_MOST_CITATIONS = 1000  # one for each passage that a sentence rests on

Id = Annotated[str, InPath(pattern="^[0-9a-f]{32}$")]


class Turn(Strict):
    """A question and its answer, as the page shows them again."""

    question: str = Field(max_length=100_000)
    answer: str = Field(max_length=1_000_000)
    finish: Literal["stop", "length", "stopped", "failed"]
    settings: str = Field(max_length=200)
    options: Object | None = None
    citations: list[Object] = Field(max_length=_MOST_CITATIONS)
    details: Object | None = None
    rating: Literal["good", "bad"] | None = None


class Title(Strict):
    """A conversation's new title."""

    title: str = Field(min_length=1, max_length=200)

    @field_validator("title")
    @classmethod
    def _is_text(cls, value: str) -> str:
        return arguments.text(value, "title")


class Conversation(Title):
    """A whole conversation."""

    turns: Annotated[list[Turn], Field(min_length=1, max_length=_MOST_TURNS, fail_fast=True)]

    @field_validator("turns")
    @classmethod
    def _are_text(cls, value: list[Turn]) -> list[Turn]:
        for turn in value:
            kept = [turn.citations, turn.details]
            arguments.text(json.dumps(kept, ensure_ascii=False), "a turn's citations and details")
        return value


def add_history(app: FastAPI, service: Service, history: History) -> None:
    """Add the routes of conversations.

    Parameters
    ----------
    app, service, history
        The application, its service, and where conversations are kept.
    """
    service.keepers.append(history.kept_bytes)
    root, one = "/v1/kvrag/conversations", "/v1/kvrag/conversations/{conversation}"

    async def run(call: Callable[..., T], http: Request, *given: Any) -> T:
        tenant = record_of(http).account.tenant
        return await service.in_thread(lambda: call(tenant, *given))

    def found(value: T) -> T:
        if not value:
            raise RequestError(404, "there is no such conversation", code="not_found")
        return value

    done = r.Health(status="ok")

    @app.get(root, responses=r.ERRORS)
    async def conversations(
        http: Request, search: Annotated[str, Query(max_length=200)] = ""
    ) -> r.Conversations:
        """List conversations, the latest first."""
        text = arguments.text(search, "search")
        rows = await run(history.find, http, text)
        return r.Conversations(conversations=[r.ConversationHead(**row) for row in rows])

    @app.get(one, responses=r.ERRORS)
    async def conversation(conversation: Id, http: Request) -> r.Conversation:
        """Return one conversation."""
        kept = await run(history.get, http, conversation)
        return r.Conversation(**found(kept or {}))

    @app.put(one, responses=r.ERRORS)
    async def keep(conversation: Id, asked: Conversation, http: Request) -> r.Health:
        """Keep a conversation, in place of what has its id."""
        turns = [turn.model_dump() for turn in asked.turns]
        growth = await run(history.growth, http, conversation, turns)
        if growth > 0:
            await service.check_room(record_of(http).account, growth)
        await run(history.put, http, conversation, asked.title, turns)
        return done

    @app.patch(one, responses=r.ERRORS)
    async def rename(conversation: Id, asked: Title, http: Request) -> r.Health:
        """Rename a conversation."""
        found(await run(history.rename, http, conversation, asked.title))
        return done

    @app.delete(one, responses=r.ERRORS)
    async def delete(conversation: Id, http: Request) -> r.Health:
        """Delete a conversation."""
        found(await run(history.delete, http, conversation))
        return done
