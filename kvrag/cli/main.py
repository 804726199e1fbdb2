"""The entry point `kvrag`: commands are registered here and live one a file."""

from __future__ import annotations

import os
from typing import Annotated

import typer

import kvrag
from kvrag.cli import pml
from kvrag.cli.bench import bench_ingest, bench_ttft
from kvrag.cli.bench_codec import bench_codec
from kvrag.cli.bench_eviction import bench_eviction
from kvrag.cli.bench_load import bench_load
from kvrag.cli.bench_pml import bench_pml
from kvrag.cli.bench_quality import bench_quality
from kvrag.cli.bench_store import bench_store
from kvrag.cli.bench_stream import bench_stream
from kvrag.cli.bench_vllm import bench_vllm
from kvrag.cli.calibrate import calibrate
from kvrag.cli.chat import chat
from kvrag.cli.demo import demo
from kvrag.cli.doctor import doctor
from kvrag.cli.failures import DEBUG_VARIABLE, guarded
from kvrag.cli.gc import gc
from kvrag.cli.ingest import ingest
from kvrag.cli.inspect import inspect
from kvrag.cli.ls import ls
from kvrag.cli.place import place
from kvrag.cli.profile import profile
from kvrag.cli.query import query
from kvrag.cli.recode import recode
from kvrag.cli.serve import serve
from kvrag.cli.serve_kv import serve_kv
from kvrag.cli.stats import stats
from kvrag.cli.train_anchors import train_anchors
from kvrag.cli.train_links import train_links
from kvrag.cli.verify import verify

app = typer.Typer(
    name="kvrag",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
train_app = typer.Typer(no_args_is_help=True, help="Train what kvrag can use beside a model.")
pml_app = typer.Typer(no_args_is_help=True, help="Prompts written as reusable modules.")
bench_app = typer.Typer(no_args_is_help=True, help="Measure kvrag against plain prefill.")


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
    """Answer questions over your documents from KV computed once, at indexing."""
    if debug:
        os.environ[DEBUG_VARIABLE] = "1"


app.command("ingest")(guarded(ingest))
app.command("query")(guarded(query))
app.command("chat")(guarded(chat))
app.command("ls")(guarded(ls))
app.command("stats")(guarded(stats))
app.command("verify")(guarded(verify))
app.command("gc")(guarded(gc))
app.command("profile")(guarded(profile))
app.command("calibrate")(guarded(calibrate))
app.command("place")(guarded(place))
app.command("recode")(guarded(recode))
# What it does not know itself it hands on to vLLM.
_HAND_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
app.command("serve", context_settings=_HAND_ON)(guarded(serve))
app.command("serve-kv")(guarded(serve_kv))
app.command("doctor")(guarded(doctor))
app.command("demo")(guarded(demo))
app.command("inspect")(guarded(inspect))
bench_app.command("ttft")(guarded(bench_ttft))
bench_app.command("ingest")(guarded(bench_ingest))
bench_app.command("quality")(guarded(bench_quality))
bench_app.command("codec")(guarded(bench_codec))
bench_app.command("store")(guarded(bench_store))
bench_app.command("load")(guarded(bench_load))
bench_app.command("stream")(guarded(bench_stream))
bench_app.command("pml")(guarded(bench_pml))
bench_app.command("eviction")(guarded(bench_eviction))
bench_app.command("vllm")(guarded(bench_vllm))
app.add_typer(bench_app, name="bench")
pml_app.command("check")(guarded(pml.check))
pml_app.command("encode")(guarded(pml.encode))
pml_app.command("run")(guarded(pml.run))
app.add_typer(pml_app, name="pml")
train_app.command("links")(guarded(train_links))
train_app.command("anchors")(guarded(train_anchors))
app.add_typer(train_app, name="train")


def run() -> None:
    """Run the command line and exit with its code."""
    app()
