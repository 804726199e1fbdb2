"""The ASGI application: routes, errors, and the OpenAPI document."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from typing import Annotated, Any

from fastapi import FastAPI, Path, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

import kvrag
from kvrag.arguments import shown
from kvrag.chunk import Chunk
from kvrag.engine.engine import KVEngine
from kvrag.engine.idle import FirstPlaces, Idle
from kvrag.engine.verify import Audits
from kvrag.errors import KVRagError
from kvrag.ingest.search import Reranker
from kvrag.server import responses as r
from kvrag.server.access import Accounts, ApiKey
from kvrag.server.citing import chunks_around, title_of
from kvrag.server.documents import Documents, add_documents
from kvrag.server.gate import PAGE, Gate
from kvrag.server.history import History, add_history
from kvrag.server.items import ItemsRequest, ItemsShape
from kvrag.server.metrics import ServerMetrics
from kvrag.server.ollama import add_ollama
from kvrag.server.problems import (
    OLLAMA,
    ClientGoneError,
    RequestError,
    as_problem,
    validation_problem,
)
from kvrag.server.queue import MAX_STREAMS, MAX_WAITING, AnswerQueue
from kvrag.server.requests import ChatRequest, CompletionRequest, EmbeddingRequest, RerankRequest
from kvrag.server.service import Service

# The page at ``/``, and what it reads: the index in figures, and chunks in their documents.


_MOST_NEIGHBOURS = 20
# Documents and answers are untrusted text: even if some became markup, nothing of it would run.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    # The file is asked for each time, and sent only if it has changed.
    "Cache-Control": "no-cache",
}


def add_page(app: FastAPI, service: Service, **allowed: bool) -> None:
    """Add the page's routes.

    Parameters
    ----------
    app, service
        The application, and what it serves.
    allowed
        ``keeps_history`` and ``can_upload``, for the page.
    """
    page = _Page(directory=str(files("kvrag.server") / "page"))
    app.mount(PAGE.rstrip("/"), page)

    @app.get("/", include_in_schema=False)
    async def index(http: Request) -> Response:
        return await page.get_response("index.html", http.scope)

    @app.get("/v1/kvrag", responses=r.ERRORS)
    async def about() -> r.About:
        """Describe the index, and what the page may ask of the server."""
        return await service.in_thread(lambda: service.about(**allowed))

    @app.get("/v1/kvrag/chunks/{chunk_id}", responses=r.ERRORS)
    async def chunk(
        chunk_id: Annotated[str, Path(max_length=200)],
        around: Annotated[int, Query(ge=0, le=_MOST_NEIGHBOURS)] = 3,
    ) -> r.Passages:
        """Return a chunk with its neighbours in the document."""
        found = await service.in_thread(lambda: chunks_around(service.index, chunk_id, around))
        if not found:
            raise RequestError(
                404,
                f"there is no chunk {shown(chunk_id)}; the documents may have changed since",
                code="chunk_not_found",
            )
        return _passages(found, chunk_id, len(service.index.catalog.chunk_ids_of(found[0].source)))


class _Page(StaticFiles):
    """The page's files, with their guards."""

    def file_response(self, *given: Any, **options: Any) -> Response:
        response = super().file_response(*given, **options)
        response.headers.update(_HEADERS)
        return response


def _passages(chunks: list[Chunk], chunk_id: str, num_chunks: int) -> r.Passages:
    return r.Passages(
        source=chunks[0].source,
        title=title_of(chunks[0]),
        num_chunks=num_chunks,
        chunk_id=chunk_id,
        passages=[
            r.Passage(
                chunk_id=one.chunk_id,
                ordinal=one.ordinal,
                text=one.text,
                heading=_text(one.metadata.get("heading")),
                page=_text(one.metadata.get("page")),
            )
            for one in chunks
        ],
    )


def _text(value: Any) -> str | None:
    return None if value is None else str(value)[:200]


@dataclass(frozen=True)
class ServerOptions:
    """How to serve.

    Attributes
    ----------
    keys
        API keys; without any, requests need none.
    origins
        Web pages' origins that may ask from a browser (CORS).
    is_local
        Whether only this machine can connect.
    top_k
        How many chunks the server retrieves, for the model ``rag:NAME``.
    max_streams, max_waiting
        See `kvrag.server.queue.AnswerQueue`.
    keeps_history
        Whether to keep the page's conversations, beside the index.
    can_upload
        Whether requests may add and delete documents.
    prepares
        Whether to make records for the first places of prompts while there is no request.
    audit
        Which share of all answers to verify against full prefill, 0 to 1, while there is no
        request.
    reranker
        What orders retrieved chunks, and the documents of ``/v1/rerank``; None: the index's search,
        and its embedding.
    """

    keys: Sequence[ApiKey] = ()
    origins: Sequence[str] = ()
    is_local: bool = True
    top_k: int = 4
    max_streams: int = MAX_STREAMS
    max_waiting: int = MAX_WAITING
    keeps_history: bool = False
    can_upload: bool = False
    prepares: bool = False
    audit: float = 0.0
    reranker: Reranker | None = None


def make_app(
    engine: KVEngine,
    options: ServerOptions = ServerOptions(),
    idle: Idle | None = None,
    metrics: ServerMetrics | None = None,
) -> ASGIApp:
    """Return the application that serves an engine's index.

    Parameters
    ----------
    engine
        What answers. The caller closes its index after the application's end.
    options
        How to serve.
    idle
        What does work between requests; None makes one.
    metrics
        What counts; None makes it.
    """
    queue = AnswerQueue(lambda: engine.moved, options.max_streams, options.max_waiting)
    metrics = metrics or ServerMetrics(engine.index)
    metrics.watch(queue)
    audits = Audits(engine, options.audit, metrics.note_verdict)
    service = Service(engine, queue, audits, options.top_k, options.reranker)
    history = History.of(engine.index) if options.keeps_history else None
    documents = Documents(engine.index, can_write=options.can_upload)

    places = [FirstPlaces(engine.index)] if options.prepares else []
    idle = idle or Idle()
    idle.jobs += [*places, *([audits] if options.audit else [])]

    async def end_answers() -> None:
        documents.stop()
        await queue.stop()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[dict[str, Any]]:
        with idle:
            loop = asyncio.get_running_loop()
            yield {"end_answers": lambda: asyncio.run_coroutine_threadsafe(end_answers(), loop)}
            await documents.close()
            await service.close()
        if history is not None:
            history.close()

    # The pages that FastAPI would add load scripts from other sites.
    app = FastAPI(
        title="kvrag", version=kvrag.__version__, docs_url=None, redoc_url=None, lifespan=lifespan
    )
    accounts = Accounts(options.keys)
    _add_routes(app, service, metrics, accounts)
    allowed = {"keeps_history": options.keeps_history, "can_upload": options.can_upload}
    add_page(app, service, **allowed)
    add_documents(app, service, documents)
    add_ollama(app, service)
    if history is not None:
        add_history(app, service, history)
    _add_errors(app)
    app.openapi = lambda: _document(app)  # type: ignore[method-assign]
    checks_host = options.is_local and not accounts.need_a_key
    gate: ASGIApp = Gate(app, accounts, metrics, checks_host, options.origins)
    gate = _Pausing(gate, idle)
    if not options.origins:
        return gate
    # Outside the gate: a browser sends no key with its first question.
    return CORSMiddleware(
        gate,
        allow_origins=options.origins,
        allow_methods=["GET", "POST"],
        # Browser clients of the OpenAI API send several more, such as x-stainless-lang.
        allow_headers=["*"],
        expose_headers=["x-request-id", "Retry-After"],
    )


class _Pausing:
    """Lets idle work wait while there is a request, except by those who watch the server."""

    def __init__(self, app: ASGIApp, idle: Idle) -> None:
        self._app = app
        self._idle = idle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_work = scope["type"] == "http" and scope["path"].startswith(("/v1/", OLLAMA))
        with self._idle.paused() if is_work else contextlib.nullcontext():
            await self._app(scope, receive, send)


def _add_routes(app: FastAPI, service: Service, metrics: ServerMetrics, accounts: Accounts) -> None:
    @app.post("/v1/chat/completions", responses=r.answers(r.ChatCompletion, streams=True))
    async def chat_completions(asked: ChatRequest, http: Request) -> Response:
        """Answer a conversation."""
        return await service.chat(asked, http)

    @app.post("/v1/kvrag/verify", responses=r.ERRORS)
    async def verify(asked: ChatRequest, http: Request) -> r.Verification:
        """Answer a conversation, and say where full prefill differs, unless others ask."""
        return await service.verify(asked, http)

    @app.post("/v1/responses", responses=r.answers(r.ItemsResponse, streams=True))
    async def responses(asked: ItemsRequest, http: Request) -> Response:
        """Answer a conversation, as items."""
        return await service.chat(asked.chat, http, partial(ItemsShape, asked))

    @app.post("/v1/completions", responses=r.answers(r.Completion, streams=True))
    async def completions(asked: CompletionRequest, http: Request) -> Response:
        """Complete a text."""
        return await service.complete(asked, http)

    @app.post("/v1/embeddings", responses=r.answers(r.EmbeddingList))
    async def embeddings(asked: EmbeddingRequest, http: Request) -> Response:
        """Return the vectors of texts."""
        return await service.embed(asked, http)

    @app.post("/v1/rerank", responses=r.ERRORS, response_model_exclude_none=True)
    async def rerank(asked: RerankRequest, http: Request) -> r.Ranking:
        """Order texts by how well they fit a question."""
        return await service.rerank(asked, http)

    @app.get("/v1/models", responses=r.ERRORS)
    async def models() -> r.ModelList:
        """List the models."""
        return service.names.listed

    @app.get("/v1/models/{name:path}", responses=r.ERRORS)
    async def model(name: str) -> r.Model:
        """Return one model."""
        for one in service.names.listed.data:
            if one.id == name:
                return one
        raise RequestError(
            404, f"there is no model {shown(name)}", code="model_not_found", param="model"
        )

    @app.get("/healthz", responses=r.ERRORS)
    async def healthz() -> r.Health:
        """Say that the server runs."""
        return r.Health(status="ok")

    @app.get("/readyz", responses={**r.answers(r.Health), 503: {"model": r.Health}})
    async def readyz() -> Response:
        """Say whether the server would accept a request now."""
        if service.is_ready:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "busy"}, 503)

    @app.get("/metrics", include_in_schema=False)
    def prometheus(http: Request) -> Response:
        accounts.check_operator(http.state.record.account)
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def invalid(http: Request, error: RequestValidationError) -> Response:
        return validation_problem(list(error.errors())).response(http.url.path)

    @app.exception_handler(HTTPException)
    async def refused(http: Request, error: HTTPException) -> Response:
        response = _refusal(http, error).response(http.url.path)
        response.headers.update(error.headers or {})
        return response

    async def failed(http: Request, error: Exception) -> Response:
        return as_problem(error).response(http.url.path)

    # uvicorn adds a traceback to the log for any other error.
    for kind in (RequestError, KVRagError, ClientDisconnect, Exception):
        app.add_exception_handler(kind, failed)


def _refusal(http: Request, error: HTTPException) -> RequestError:
    """Return the problem for an error of the framework, whose words say little."""
    if isinstance(error.__cause__, ClientDisconnect):
        return ClientGoneError()
    if isinstance(error.__cause__, RecursionError | ValueError):
        return RequestError(
            400,
            "the body is not valid JSON: it is not in UTF-8, is nested too deeply, or has too long "
            "a number",
            code="invalid_json",
        )
    if error.status_code in (404, 405):
        route = f"{http.method} {shown(http.url.path)}"
        return RequestError(
            error.status_code, f"there is no route {route}; /openapi.json has all routes"
        )
    return RequestError(error.status_code, str(error.detail))


def _document(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document, without the 422 that FastAPI adds to each route."""
    if app.openapi_schema is None:
        found = get_openapi(title=app.title, version=app.version, routes=app.routes)
        for route in found["paths"].values():
            for operation in route.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            found["components"]["schemas"].pop(name, None)
        app.openapi_schema = found
    return app.openapi_schema
