"""`kvrag inspect`: what reuse does to one prompt, as pictures and as numbers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvrag.cli import console
from kvrag.cli import options as o
from kvrag.errors import ParameterError
from kvrag_bench.cli import options as b

if TYPE_CHECKING:
    from kvrag_bench.inspection.eviction import EvictionInspection
    from kvrag_bench.inspection.measure import Inspection


def inspect(
    folder: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Where the PNGs go.", show_default=False),
    ] = None,
    eviction: Annotated[
        Path | None,
        typer.Option(
            "--eviction",
            metavar="FILE.png",
            help="Draw which tokens eviction keeps; with or in place of --out.",
            show_default=False,
        ),
    ] = None,
    eviction_policy: Annotated[
        str,
        typer.Option(help="What forgets, as --eviction of 'kvrag query'.", hidden=True),
    ] = "corm:window=16:recent=16",
    model: b.NamedModelOption = "kvrag-tiny",
    data: Annotated[
        str,
        typer.Option(help="Data set, as for 'kvrag bench quality'."),
    ] = "generated",
    question: Annotated[int, typer.Option(min=0, help="Which of its questions, from 0.")] = 0,
    policies: Annotated[
        str,
        typer.Option(help="Policies whose picks to show, with commas."),
    ] = "boundary,deviation,two_stage",
    ratio: Annotated[float, typer.Option(help="Share each may recompute.")] = 0.15,
    no_chat: o.NoChatOption = False,
    device: o.DeviceOption = None,
    as_json: o.JsonOption = False,
) -> None:
    """Show where reused KV is off, what policies repair, and what the question attends to.

    With --eviction, show which tokens stay in memory while the answer is written.
    """
    from kvrag.cli.opening import quiet_libraries
    from kvrag.eviction.registry import make_eviction
    from kvrag_bench.quality.datasets import load_questions
    from kvrag_bench.quality.entrants import QualityOptions, contestants

    if folder is None and eviction is None:
        raise ParameterError("nothing to draw: give --out DIR, or --eviction FILE.png")
    names = tuple(part.strip() for part in policies.split(",") if part.strip())
    contestants(QualityOptions(policies=names or ("none",), ratios=(ratio,)))
    forgets = make_eviction(eviction_policy)
    if forgets is None:
        raise ParameterError("eviction-policy none forgets nothing: there is nothing to see")
    from kvrag_bench.inspection.kept_text import draw_eviction
    from kvrag_bench.inspection.picture import draw_inspection
    from kvrag_bench.quality.picture import check_picture_path

    if eviction is not None:
        check_picture_path(eviction)
    questions = load_questions(data, question + 1)
    if question >= len(questions):
        raise ParameterError(f"--question {question}: {data} has {len(questions)}, from 0")
    from kvrag.models.kv_model import KVModel
    from kvrag_bench.inspection.eviction import inspect_eviction
    from kvrag_bench.inspection.measure import inspect_question

    quiet_libraries()
    found: Inspection | None = None
    kept: EvictionInspection | None = None
    paths: list[Path] = []
    with console.working("inspecting"):
        loaded, asked = KVModel.load(model, device=device), questions[question]
        if folder is not None:
            found = inspect_question(loaded, asked, names, ratio, use_chat_template=not no_chat)
            paths += draw_inspection(found, folder)
        if eviction is not None:
            kept = inspect_eviction(loaded, asked, forgets, use_chat_template=not no_chat)
            draw_eviction(kept, eviction)
            paths.append(eviction)
    for path in paths:
        console.note(f"picture: {path}")
    if as_json:
        fields = {} if found is None else console.plain(found)
        console.print_json(fields if kept is None else {**fields, "eviction": kept})
        return
    if found is not None:
        _print(found)
    if kept is not None:
        _print_kept(kept)


def _print_kept(found: EvictionInspection) -> None:
    out = console.out()
    out.print(found.question, markup=False)
    gone = [number for number, share in enumerate(found.shares) if share == 0.0]
    out.print(
        f"{found.policy} keeps {sum(found.shares) / len(found.shares):.0%} of "
        f"{len(found.tokens):,} tokens, by layer: "
        + ", ".join(
            f"{sum(map(len, layer)) / len(layer) / len(found.tokens):.0%}" for layer in found.kept
        )
        + f"; {len(gone):,} are gone from all heads",
        markup=False,
    )
    for name, text in (("answer", found.answer), ("with the full cache", found.full_answer)):
        out.print(f"{name}: {console.harmless(text)}", markup=False)


def _print(found: Inspection) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("layer", "keys off", "values off", "rank to next", "key delta", "value delta"):
        table.add_column(name, justify="right", no_wrap=True)
    rows = [row for begin, end in found.spans for row in range(begin, end)]
    for layer, deviations in enumerate(
        zip(found.key_deviation, found.value_deviation, strict=True)
    ):
        means = [sum(values[row] for row in rows) / len(rows) for values in deviations]
        correlation = (*found.rank_correlation, None)[layer]
        table.add_row(
            str(layer),
            *(f"{mean:.3f}" for mean in means),
            "" if correlation is None else f"{correlation:+.2f}",
            f"{found.key_delta_variance[layer]:.2f}",
            f"{found.value_delta_variance[layer]:.2f}",
        )
    out = console.out()
    out.print(found.question, markup=False)
    out.print(table)
    for policy, picked in found.picked.items():
        text = " ".join(found.tokens[row].strip() or "_" for row in picked)
        out.print(f"{policy} computes again: {console.harmless(text)}", markup=False)
