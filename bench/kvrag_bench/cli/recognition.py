"""`kvrag bench recognition`: how much of prompts is reused, and what finding it takes."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvrag.cli import console
from kvrag.cli import options as o
from kvrag.errors import ParameterError
from kvrag_bench.cli import lists

if TYPE_CHECKING:
    from kvrag_bench.recognition.lookup import LookupRow
    from kvrag_bench.recognition.reuse import ReuseRow

_PARTS = ("reuse", "lookup")


def bench_recognition(
    parts: Annotated[
        str,
        typer.Option(
            help="What to measure, with commas: reuse (documents cut by the splitters of other "
            "frameworks, and altered by prompts), lookup (a prompt among very many chunks)."
        ),
    ] = ",".join(_PARTS),
    model: Annotated[
        str, typer.Option("--model", "-m", help="Whose tokenizer reads the documents.")
    ] = "smollm2-135m",
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="A folder of text files. Default: the handbook of the demo."
        ),
    ] = None,
    chunk_tokens: Annotated[
        int, typer.Option(min=16, help="Largest number of tokens in a chunk.")
    ] = 256,
    chunks: Annotated[int, typer.Option(min=1000, help="Chunks of lookup.")] = 1_000_000,
    tokens: Annotated[int, typer.Option(min=300, help="Tokens of lookup's prompt.")] = 8000,
    as_json: o.JsonOption = False,
) -> None:
    """Lay prompts out over an index: no weights are loaded, and nothing is computed."""
    wanted = lists.names(parts, "--parts")
    if unknown := [one for one in wanted if one not in _PARTS]:
        raise ParameterError(f"--parts {unknown[0]!r}: expected {' or '.join(_PARTS)}")
    from kvrag.cli.opening import quiet_libraries
    from kvrag_bench.quality.handbook import handbook_pages
    from kvrag_bench.recognition.lookup import measure_lookup
    from kvrag_bench.recognition.reuse import measure_reuse

    quiet_libraries()
    found: dict[str, Any] = {}
    with console.progress("measuring") as say, tempfile.TemporaryDirectory() as folder:
        if "reuse" in wanted:
            documents = handbook_pages() if data is None else _texts(data)
            rows = measure_reuse(Path(folder), model, documents, chunk_tokens, say)
            found["reuse"] = list(rows)
        if "lookup" in wanted:
            found["lookup"] = measure_lookup(chunks, chunk_tokens, tokens, say)
    if as_json:
        console.print_json(found)
        return
    if "reuse" in found:
        _print_reuse(found["reuse"])
    if "lookup" in found:
        _print_lookup(found["lookup"])


def _texts(folder: Path) -> list[str]:
    paths = sorted(path for path in folder.iterdir() if path.is_file()) if folder.is_dir() else []
    if not paths:
        raise ParameterError(f"--data {str(folder)!r}: expected a folder of text files")
    return [path.read_text("utf-8") for path in paths]


def _print_reuse(rows: list[ReuseRow]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("text of the index in the prompt")
    for name in ("prompts", "tokens", "whole chunks", "with runs", "spans"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.name,
            str(row.num_prompts),
            f"{row.num_tokens:,}",
            f"{row.whole:.1%}",
            f"{row.runs:.1%}",
            f"{row.num_spans:,}",
        )
    console.out().print(table)


def _print_lookup(row: LookupRow) -> None:
    console.out().print(
        f"{row.num_chunks:,} chunks of {row.chunk_tokens} tokens: a table of "
        f"{row.size_bytes / 1e6:.0f} MB, made in {row.build_seconds:.1f} s; 1,000 more chunks in "
        f"{1000 * row.add_seconds:.0f} ms\n"
        f"a prompt of {row.num_tokens:,} tokens: looked up in {1000 * row.table_seconds:.2f} ms, "
        f"candidates compared in {1000 * row.compare_seconds:.2f} ms, {row.reused:.1%} reused\n"
        "seconds are CPU time",
        markup=False,
    )
