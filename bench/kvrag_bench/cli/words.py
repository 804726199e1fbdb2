"""`kvrag bench words`: recall of searches by words, in any language."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvrag.cli import console
from kvrag.cli import options as o

if TYPE_CHECKING:
    from kvrag_bench.words import WordsRow


def bench_words(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE", help="Texts or HTML pages, each of one language."),
    ],
    as_json: o.JsonOption = False,
) -> None:
    """Search by words for passages, with several ways of cutting texts into words.

    Each line of at least 20 characters is a passage. What is asked comes from the passage: a piece
    of it (three words in a row, or eight characters where words have no spaces), and one or two
    words that few other passages have, which ICU's dictionaries choose (pip install icu4py).
    """
    from kvrag_bench.words import run_words_bench

    rows = list(run_words_bench(files))
    if as_json:
        console.print_json(rows)
    else:
        _print_rows(rows)


def _print_rows(rows: Sequence[WordsRow]) -> None:
    from rich.table import Table

    ways = {row.way: row.index_ratio for row in rows}
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("file")
    table.add_column("asked")
    for way, ratio in ways.items():
        table.add_column(f"{way} ({ratio:.1f}x)", justify="right")
    for file, asked, number in dict.fromkeys((r.file, r.asked, r.num_questions) for r in rows):
        own = {row.way: row for row in rows if (row.file, row.asked) == (file, asked)}
        cells = [f"{row.recall_1:.2f} {row.recall_4:.2f}" for row in own.values()]
        table.add_row(file, f"{asked} ({number})", *cells)
    console.out().print(table)
