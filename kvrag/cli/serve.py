"""`kvrag serve` and `kvrag mcp`: an index over an OpenAI-compatible API, and as MCP tools."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvrag import arguments
from kvrag.arguments import cut, shown
from kvrag.cli import console
from kvrag.cli import options as o
from kvrag.cli.command import given
from kvrag.cli.opening import load_reranker, warm_up
from kvrag.errors import ParameterError

if TYPE_CHECKING:
    from starlette.types import ASGIApp

_TRANSFORMERS, _VLLM = "transformers", "vllm"
# The parameters that vLLM alone takes, and those that both engines take.
_OF_VLLM = ("only_asked", "any_version", "show")
_OF_BOTH = (
    *("context", "opening", "answering", "engine", "index", "store", "host", "port"),
    *("policy", "ratio", "boundary_tokens"),
)


def serve(
    context: typer.Context,
    opening: o.Opening,
    answering: o.Answering,
    engine: Annotated[str, typer.Option(metavar=f"{_TRANSFORMERS}|{_VLLM}")] = _TRANSFORMERS,
    top_k: Annotated[int, o.setting("-k", min=1)] = o.DEFAULT_TOP_K,
    rerank: o.RerankOption = None,
    host: Annotated[str, typer.Option()] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8000,
    keys: Annotated[Path | None, typer.Option(metavar="FILE")] = None,
    anyone: Annotated[bool, o.setting("--anyone")] = False,
    allow_origin: Annotated[list[str] | None, o.setting(metavar="URL")] = None,
    allow_upload: Annotated[bool, o.setting("--allow-upload")] = False,
    no_history: Annotated[bool, o.setting("--no-history")] = False,
    audit: Annotated[float, o.setting(min=0, max=1, metavar="SHARE")] = 0.0,
    streams: Annotated[int, o.setting(min=1)] = 8,
    waiting: Annotated[int, o.setting(min=0)] = 128,
    grace: Annotated[int, o.setting(min=0)] = 30,
    trace: Annotated[str | None, o.setting(metavar="URL")] = None,
    refresh: Annotated[float, o.setting(parser=o.above_zero, metavar="SECONDS")] = 5.0,
    only_asked: Annotated[bool, o.setting("--only-asked")] = False,
    any_version: Annotated[bool, o.setting("--any-version")] = False,
    show: Annotated[bool, o.setting("--show")] = False,
) -> None:
    """Serve an index to clients of the OpenAI API, which need no change.

    With --engine vllm, options that are not listed here are passed to 'vllm serve'
    (--max-model-len, --api-key, ...).

    Parameters
    ----------
    engine
        What generates: Transformers in this process, or vLLM, which is installed apart.
    top_k
        Chunks that the server retrieves, for the model rag:NAME.
    host
        Address to listen on.
    port
        Port to listen on; 0 picks a free one.
    keys
        TOML file of API keys and their limits; other users may not read it. Default: the one key in
        the variable KVRAG_SERVER_KEY, or none.
    anyone
        Serve other machines without keys.
    allow_origin
        Let pages of this origin ask from a browser (CORS); repeatable.
    allow_upload
        Let everybody who may ask add and delete documents, too.
    no_history
        Keep no conversations of the page. Default: they are in a file beside the index.
    audit
        Verify this share of the answers against full prefill while nobody asks; /metrics shows the
        result.
    streams
        Answers generated at the same time; each holds its prompt's KV in memory.
    waiting
        Answers that may wait for their turn; more are refused.
    grace
        Seconds that answers get to finish when the server stops.
    trace
        OpenTelemetry collector that gets a span of each request, search and answer, without texts
        (OTLP over HTTP).
    refresh
        How often to look for changes of a shared index (--index URL).
    only_asked
        vLLM: look for chunks only in prompts whose client asks for it.
    any_version
        vLLM: accept untested versions.
    show
        vLLM: print the command; start nothing.
    """
    if engine not in (_TRANSFORMERS, _VLLM):
        raise ParameterError(f"--engine {shown(engine)}: expected {_TRANSFORMERS!r} or {_VLLM!r}")
    apart = (*_OF_BOTH, *_OF_VLLM)
    of_other = [name for name in context.params if name not in apart]
    unfit = given(context, *(of_other if engine == _VLLM else _OF_VLLM))
    if engine == _TRANSFORMERS and context.args:
        known = [name for one in context.command.params for name in one.opts]
        named = cut(context.args[0].partition("=")[0])
        raise ParameterError(
            f"there is no option {named}{arguments.like(named, known)}; options of 'vllm serve' "
            "are for --engine vllm"
        )
    if unfit:
        other = _TRANSFORMERS if engine == _VLLM else _VLLM
        raise ParameterError(f"{unfit[0]} is for --engine {other}; leave it out")
    if engine == _VLLM:
        _serve_vllm(
            {
                "index": str(opening.index),
                "store": opening.store,
                "policy": answering.policy,
                "ratio": answering.ratio,
                "boundary_tokens": answering.boundary_tokens,
                "find_chunks": not only_asked,
                "any_version": any_version,
            },
            {"host": host, "port": port, "more": context.args},
            show=show,
        )
        return
    from kvrag.plugins import require

    for module in ("fastapi", "uvicorn", "prometheus_client"):
        require(module, "serve")
    with o.importing():
        from kvrag.cli.listening import listening
        from kvrag.engine.idle import Idle
        from kvrag.server.access import is_loopback, read_keys
        from kvrag.server.app import ServerOptions, make_app
        from kvrag.server.metrics import ServerMetrics
        from kvrag.server.running import Server, check_address, check_origin, log_to_stderr

    api_keys = read_keys(keys)
    check_address(host, has_keys=bool(api_keys), anyone=anyone)
    options = ServerOptions(
        keys=api_keys,
        origins=tuple(map(check_origin, allow_origin or ())),
        is_local=is_loopback(host),
        top_k=top_k,
        max_streams=streams,
        max_waiting=waiting,
        can_upload=allow_upload,
        prepares=True,
        audit=audit,
        reranker=load_reranker(rerank),
        # Strangers without keys would read each other's.
        keeps_history=not no_history and (bool(api_keys) or is_loopback(host)),
    )

    with _traced(trace) as traced, opening.open() as opened:
        made = answering.engine(opened, max_batch=options.max_streams)
        warm_up(opened)
        opened.follow(refresh)
        log_to_stderr()
        idle, metrics = Idle(), ServerMetrics(opened)
        app = traced(make_app(made, options, idle, metrics))
        server = Server(app, host, port, grace_seconds=grace)
        said = f"{server.url}/v1\n{server.url}/  (a page to ask in)"
        with listening(made, idle, metrics, opening, answering, grace):
            until_told(server.serve_forever, server.stop, said)


@contextmanager
def _traced(collector: str | None) -> Iterator[Callable[[ASGIApp], ASGIApp]]:
    """Yield what makes an application tell a collector of its requests."""
    if collector is None:
        yield lambda app: app
        return
    from kvrag.plugins import require

    require("opentelemetry.exporter.otlp.proto.http", "otel")
    from kvrag.engine.tracing import trace
    from kvrag.server.tracing import Traced, exporting_to

    provider = exporting_to(collector)
    end = trace(tracer_provider=provider)
    try:
        yield lambda app: Traced(app, provider)
    finally:
        end()
        provider.shutdown()  # sends what is left


def _serve_vllm(settings: dict[str, Any], command: dict[str, Any], *, show: bool) -> None:
    from kvrag.llms.vllm.options import serve_command
    from kvrag.llms.vllm.settings import ConnectorSettings

    words = serve_command(ConnectorSettings(**settings), **command)
    if show:
        import shlex

        print(shlex.join(words))
        return
    if os.name == "posix":
        sys.stdout.flush()
        # vLLM replaces this process, so that signals and the exit code are the server's.
        os.execv(words[0], words)
    raise typer.Exit(subprocess.run(words, check=False).returncode)


def mcp(
    opening: o.Opening,
    answering: o.Answering,
    sampled: o.Sampled,
    http: Annotated[bool, typer.Option("--http")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8000,
    top_k: Annotated[int, o.setting("-k", min=1, max=50)] = o.DEFAULT_TOP_K,
) -> None:
    """Offer an index to agents as MCP tools: search, answer and read_chunk.

    A client such as an editor starts this command and talks over its stdin and stdout.

    Parameters
    ----------
    http
        Listen at http://127.0.0.1:PORT/mcp for programs of this machine, instead of talking over
        stdin and stdout.
    port
        Port for --http to listen on; 0 picks a free one.
    top_k
        Chunks that a question is answered from, if a call says nothing else.
    """
    from kvrag.plugins import require

    require("mcp", "mcp")
    with o.importing():
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


def until_told(serve: Callable[[], None], stop: Callable[[], None], said: str) -> None:
    """Serve until SIGTERM or SIGINT arrives, and finish the answers that have begun.

    Parameters
    ----------
    serve
        Serves until `stop` is called, in a thread.
    stop
        Returns after the last answer.
    said
        A line for stdout, once the server listens.
    """
    told = threading.Event()

    def run() -> None:
        try:
            serve()
        finally:
            told.set()

    before = {
        number: signal.signal(number, lambda *_: told.set())
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    thread = threading.Thread(target=run, name="kvrag-serve")
    thread.start()
    try:
        console.write(f"{said}\n")
        told.wait()
    finally:
        stop()
        thread.join()
        for number, handler in before.items():
            signal.signal(number, handler)
