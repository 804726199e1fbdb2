"""`kvrag serve`: serve an index with vLLM's OpenAI-compatible server."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Annotated

import typer

from kvrag.cli import options as o
from kvrag.fusion.policies import DEFAULT_POLICY


def serve(
    context: typer.Context,
    index: o.IndexOption = o.DEFAULT_INDEX,
    store: o.StoreOption = None,
    policy: o.PolicyOption = DEFAULT_POLICY,
    ratio: o.RatioOption = None,
    boundary_tokens: o.BoundaryTokensOption = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    artefacts: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Store of prompts fused in advance. Default: a folder in the index's folder.",
            rich_help_panel=o.TUNING,
            show_default=False,
        ),
    ] = None,
    only_asked: Annotated[
        bool,
        typer.Option(
            "--only-asked",
            help="Look for chunks only in prompts whose client asks for it.",
            rich_help_panel=o.TUNING,
        ),
    ] = False,
    any_version: Annotated[
        bool,
        typer.Option(
            "--any-version",
            help="Accept untested versions of vLLM.",
            rich_help_panel=o.RESEARCH,
        ),
    ] = False,
    show: Annotated[
        bool, typer.Option("--show", help="Print the vllm command; start nothing.")
    ] = False,
) -> None:
    """Serve an index with vLLM, which reuses the stored KV of the chunks in each prompt.

    Clients of the OpenAI API need no change. Options that are not listed here are passed to 'vllm
    serve' (--max-model-len, --api-key, ...).
    """
    from kvrag.llms.vllm.options import serve_command
    from kvrag.llms.vllm.settings import ConnectorSettings

    settings = ConnectorSettings(
        str(index),
        store=store,
        artefacts=artefacts,
        policy=policy,
        ratio=ratio,
        boundary_tokens=boundary_tokens,
        find_chunks=not only_asked,
        any_version=any_version,
    )
    command = serve_command(settings, host=host, port=port, more=context.args)
    if show:
        import shlex

        print(shlex.join(command))
        return
    if os.name == "posix":
        sys.stdout.flush()
        # vLLM replaces this process, so that signals and the exit code are the server's.
        os.execv(command[0], command)
    raise typer.Exit(subprocess.run(command, check=False).returncode)
