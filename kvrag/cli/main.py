"""The entry point `kvrag`: registers the commands, each of which has its own file."""

from __future__ import annotations

import gc
import io
import os
import sys
from typing import Annotated

import typer

import kvrag
from kvrag import metakernels
from kvrag.cli.command import lazy_group
from kvrag.cli.console import DEBUG_VARIABLE, guarded

_COMMANDS = {
    "ingest": "ingest:ingest",
    "query": "query:query",
    "chat": "chat:chat",
    "adopt": "ingest:adopt",
    "search": "query:search",
    "explain": "query:explain",
    "ls": "upkeep:ls",
    "rm": "upkeep:rm",
    "stats": "upkeep:stats",
    "verify": "upkeep:verify",
    "gc": "upkeep:gc",
    "profile": "upkeep:profile",
    "calibrate": "calibrate:calibrate",
    "choose-store": "calibrate:choose_store",
    "recode": "upkeep:recode",
    "serve": "serve:serve",
    "mcp": "serve:mcp",
    "doctor": "checkup:doctor",
    "config": "config:config",
    "demo": "demo:demo",
    "inspect": "kvrag_bench.cli.inspect:inspect",
    "bench": "kvrag_bench.cli:app",
    "train": "kvrag_train.cli:app",
}
_MODELS_COMMANDS = {
    "list": "models:list_models",
    "pull": "models:pull",
    "convert": "models:convert",
    "check": "models:check",
    "rm": "models:rm",
}
_PML_COMMANDS = {"check": "pml:check", "encode": "pml:encode", "run": "pml:run"}
_GONE = {
    "serve-kv": "is gone: let a web server (nginx, Caddy) serve the index's folder 'kv' and name "
    "it with --store http://HOST/PATH, or keep the KV in Redis or a bucket"
}
# `serve` passes options that it does not know to vLLM.
_SETTINGS = {
    "serve": {"context_settings": {"allow_extra_args": True, "ignore_unknown_options": True}}
}

app = typer.Typer(
    name="kvrag",
    cls=lazy_group(_COMMANDS, _SETTINGS, _GONE),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"kvrag {kvrag.__version__}")
        raise typer.Exit


@app.callback()
def main(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
    version: Annotated[  # noqa: ARG001
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Answer questions about your documents from KV that is computed once, at indexing."""
    if debug:
        os.environ[DEBUG_VARIABLE] = "1"


app.add_typer(
    typer.Typer(
        cls=lazy_group(_PML_COMMANDS),
        no_args_is_help=True,
        help="Check, encode and run prompts written as reusable modules.",
    ),
    name="pml",
)


_models = typer.Typer(cls=lazy_group(_MODELS_COMMANDS), invoke_without_command=True)
app.add_typer(_models, name="models")


@_models.callback()
def models(context: typer.Context) -> None:
    """Models by name, and GGUF files: list, install, convert, remove."""
    if context.invoked_subcommand is None:
        from kvrag.cli.models import list_models

        guarded(list_models)()


def _let_waiting_threads_sleep() -> None:
    """Bound the time that OpenMP's threads spin, unless the environment says how they wait.

    A thread that spins keeps the core from the thread that it waits for, where other programs
    take the cores too. Must run before PyTorch is imported. docs/results/speed.md has figures.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "10000"


def _collect_garbage_less_often() -> None:
    """Let more objects be made between two of Python's collections: 10,000 rather than 700.

    Importing the libraries makes 500,000 objects that stay. Collections, which look through
    all of them again and again, took a sixth of the time to the first token.
    """
    if gc.get_threshold()[0]:  # 0: switched off
        gc.set_threshold(max(10_000, gc.get_threshold()[0]), *gc.get_threshold()[1:])


def run() -> None:
    """Run the command line and exit with its code."""
    _let_waiting_threads_sleep()
    _collect_garbage_less_often()
    if sys.argv[1:2] != ["serve"]:  # whose threads may need them at once, whatever they import
        metakernels.postpone()
    for stream in (sys.stdout, sys.stderr):
        # File names may contain bytes that are not text: they are shown escaped.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        app()
    finally:
        # Python collects garbage once more before it ends, which takes a second with all libraries
        # imported. What is frozen is left out. Triton, which comes with PyTorch for cards, would
        # then complain of it at the exit.
        if "triton" not in sys.modules:
            gc.freeze()
