"""`kvrag mcp`: tools for agents, over the Model Context Protocol."""

from __future__ import annotations

from typing import Annotated

import typer

from kvrag.cli import options as o
from kvrag.cli.listening import until_told
from kvrag.cli.opening import warm_up


def mcp(
    opening: o.Opening,
    answering: o.Answering,
    sampled: o.Sampled,
    http: Annotated[
        bool,
        typer.Option(
            "--http",
            help="Listen at http://127.0.0.1:PORT/mcp for programs of this machine, instead of "
            "talking over stdin and stdout.",
        ),
    ] = False,
    port: Annotated[
        int,
        typer.Option(min=0, max=65535, help="Port for --http to listen on; 0 picks a free one."),
    ] = 8000,
    top_k: Annotated[
        int,
        o.setting(
            "-k",
            min=1,
            max=50,
            help="Chunks that a question is answered from, if a call says nothing else.",
        ),
    ] = o.DEFAULT_TOP_K,
) -> None:
    """Offer an index to agents as MCP tools: search, answer and read_chunk.

    A client such as an editor starts this command and talks over its stdin and stdout.
    """
    from kvrag.plugins import require

    require("mcp", "mcp")
    from kvrag.server.mcp import make_server

    with opening.open() as opened:
        engine = answering.engine(opened, max_batch=8)
        server = make_server(engine, top_k, sampled.values)
        warm_up(opened)
        opened.follow()
        if not http:
            server.run("stdio")
            return
        from kvrag.server.running import Server

        listening = Server(server.streamable_http_app(), port=port)
        until_told(listening.serve_forever, listening.stop, f"{listening.url}/mcp")
