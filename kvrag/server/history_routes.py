"""Routes of the page's conversations. A key sees those of its tenant."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import FastAPI, Path, Query, Request
from pydantic import Field, field_validator
from starlette.responses import Response

from kvrag import arguments
from kvrag.server import responses as r
from kvrag.server.history import History
from kvrag.server.problems import RequestError
from kvrag.server.requests import Object, Strict
from kvrag.server.service import Service, private, record_of

_MOST_TURNS = 200
_MOST_CITATIONS = 100

Id = Annotated[str, Path(pattern="^[0-9a-f]{32}$")]


class Turn(Strict):
    """A question and its answer, as the page shows them again."""

    question: str = Field(max_length=100_000)
    answer: str = Field(max_length=1_000_000)
    finish: Literal["stop", "length", "stopped", "failed"]
    settings: str = Field(max_length=200)
    citations: list[Object] = Field(max_length=_MOST_CITATIONS)
    details: Object | None = None


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


def add_history(app: FastAPI, service: Service, history: History, answers: Any) -> None:
    """Add the routes of conversations.

    Parameters
    ----------
    app, service, history
        The application, its service, and where conversations are kept.
    answers
        Returns the responses of a route for the OpenAPI document, from the model of a good one.
    """
    service.keepers.append(history.kept_bytes)
    root, one = "/v1/kvrag/conversations", "/v1/kvrag/conversations/{conversation}"

    def found(value: Any) -> Any:
        if not value:
            raise RequestError(404, "there is no such conversation", code="not_found")
        return value

    def done() -> Response:
        return private({"status": "ok"})

    @app.get(root, responses=answers(r.Conversations))
    async def conversations(
        http: Request, search: Annotated[str, Query(max_length=200)] = ""
    ) -> Response:
        """List conversations, the latest first."""
        tenant = _tenant(http)
        text = arguments.text(search, "search")
        listed = await service.in_thread(lambda: history.find(tenant, text))
        return private({"conversations": listed})

    @app.get(one, responses=answers(r.Conversation))
    async def conversation(conversation: Id, http: Request) -> Response:
        """Return one conversation."""
        tenant = _tenant(http)
        told = await service.in_thread(lambda: history.get(tenant, conversation))
        return private(found(told))

    @app.put(one, responses=answers(r.Health))
    async def keep(conversation: Id, asked: Conversation, http: Request) -> Response:
        """Keep a conversation, in place of what has its id."""
        tenant = _tenant(http)
        turns = [turn.model_dump() for turn in asked.turns]
        growth = await service.in_thread(lambda: history.growth(tenant, conversation, turns))
        if growth > 0:
            await service.check_room(record_of(http).account, growth)
        await service.in_thread(lambda: history.put(tenant, conversation, asked.title, turns))
        return done()

    @app.patch(one, responses=answers(r.Health))
    async def rename(conversation: Id, asked: Title, http: Request) -> Response:
        """Rename a conversation."""
        tenant = _tenant(http)
        found(await service.in_thread(lambda: history.rename(tenant, conversation, asked.title)))
        return done()

    @app.delete(one, responses=answers(r.Health))
    async def delete(conversation: Id, http: Request) -> Response:
        """Delete a conversation."""
        tenant = _tenant(http)
        found(await service.in_thread(lambda: history.delete(tenant, conversation)))
        return done()


def _tenant(http: Request) -> str:
    return record_of(http).account.tenant
