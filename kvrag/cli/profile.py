"""`kvrag profile`: fit a codec to an index's model and documents."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvrag import arguments
from kvrag.cli import console
from kvrag.cli import options as o

if TYPE_CHECKING:
    from kvrag.codec.profile import Profile


def profile(
    opening: o.Opening,
    codec: Annotated[
        str, typer.Option(help="Codec to fit: transform, transform:BITS, cachegen or lossless.")
    ] = "transform",
    tokens: Annotated[
        int,
        typer.Option(
            min=256,
            help="Tokens in the sample, taken evenly from the index.",
            hidden=True,
        ),
    ] = 16_384,
    out: Annotated[
        Path | None,
        typer.Option(help="Also write the profile to this file, for other indexes of the model."),
    ] = None,
    as_json: o.JsonOption = False,
) -> None:
    """Fit a codec's bases and probability tables, and save them in the index.

    The index keeps its codec and its KV. To use the profile, run 'kvrag recode --profile', or
    'kvrag ingest --profile' for a new index of the same model.
    """
    with (
        opening.open() as opened,
        console.progress("reading the index") as say,
    ):
        fitted = opened.upkeep.fit_profile(codec, num_tokens=tokens, on_progress=say)
    if out is not None:
        from kvrag.ingest.config import write_atomically

        write_atomically(arguments.resolved_path(out, "--out"), fitted.content)
    if as_json:
        console.print_json(_plain(fitted))
    else:
        _print(fitted)


def _plain(fitted: Profile) -> dict[str, object]:
    return {
        "hash": fitted.hash,
        "num_tokens": fitted.num_tokens,
        "size_bytes": len(fitted.content),
        "levels": [
            {
                "level": level.name,
                "bits_per_element": level.bits,
                "bits_by_plane": [plane.bits for plane in level.planes],
                "relative_error": level.relative_error,
            }
            for level in fitted.levels
        ],
    }


def _print(fitted: Profile) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("level", no_wrap=True)
    for name in ("bits per element", "relative error"):
        table.add_column(name, justify="right", no_wrap=True)
    for level in fitted.levels:
        table.add_row(level.name, f"{level.bits:.3f}", f"{level.relative_error:.2g}")
    console.out().print(table)
    size = console.format_bytes(len(fitted.content))
    console.write(f"{fitted.num_tokens:,} tokens, {size}, profile {fitted.hash}\n")
