"""The page at ``/``, and what it reads: the index in figures, and chunks in their documents."""

from __future__ import annotations

import hashlib
from importlib.resources import files
from typing import Annotated, Any

from fastapi import FastAPI, Path, Query, Request
from starlette.responses import Response

from kvrag.arguments import shown
from kvrag.chunk import Chunk
from kvrag.server import responses as r
from kvrag.server.gate import PAGE
from kvrag.server.problems import RequestError
from kvrag.server.retrieving import chunks_around, title_of
from kvrag.server.service import Service, private

_TYPES = {
    "index.html": "text/html; charset=utf-8",
    "app.js": "text/javascript; charset=utf-8",
    "app.css": "text/css; charset=utf-8",
}
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
    folder = files("kvrag.server") / "page"
    contents = {name: (folder / name).read_bytes() for name in _TYPES}
    tags = {name: f'"{hashlib.sha256(body).hexdigest()[:32]}"' for name, body in contents.items()}

    def send(name: str, http: Request) -> Response:
        headers = {**_HEADERS, "ETag": tags[name]}
        if tags[name] in http.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(contents[name], media_type=_TYPES[name], headers=headers)

    @app.get("/", include_in_schema=False)
    async def page(http: Request) -> Response:
        return send("index.html", http)

    @app.get(PAGE + "{name}", include_in_schema=False)
    async def page_file(name: str, http: Request) -> Response:
        if name not in contents:
            raise RequestError(404, f"the page has no file {shown(name)}")
        return send(name, http)

    @app.get("/v1/kvrag", responses=r.answers(r.About))
    async def about() -> Response:
        """Describe the index, and what the page may ask of the server."""
        told = await service.in_thread(lambda: service.about(**allowed))
        return private(told.model_dump(mode="json"))

    @app.get("/v1/kvrag/chunks/{chunk_id}", responses=r.answers(r.Passages))
    async def chunk(
        chunk_id: Annotated[str, Path(max_length=200)],
        around: Annotated[int, Query(ge=0, le=_MOST_NEIGHBOURS)] = 3,
    ) -> Response:
        """Return a chunk with its neighbours in the document."""
        found = await service.in_thread(lambda: chunks_around(service.index, chunk_id, around))
        if not found:
            raise RequestError(
                404,
                f"there is no chunk {shown(chunk_id)}; the documents may have changed since",
                code="chunk_not_found",
            )
        body = _passages(found, chunk_id, len(service.index.catalog.chunk_ids_of(found[0].source)))
        return private(body.model_dump(mode="json"))


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
