"""`kvrag inspect`: what reuse does to one prompt, as pictures and as numbers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvrag.cli import console
from kvrag.cli import options as o
from kvrag.errors import ParameterError

if TYPE_CHECKING:
    from kvrag.bench.inspection.measure import Inspection


def inspect(
    folder: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where the PNGs go.")],
    model: o.NamedModelOption = "kvrag-tiny",
    data: Annotated[
        str, typer.Option(help="Data set, as for 'kvrag bench quality'.")
    ] = "generated",
    question: Annotated[int, typer.Option(min=0, help="Which of its questions, from 0.")] = 0,
    policies: Annotated[
        str, typer.Option(help="Policies whose picks to show, with commas.")
    ] = "boundary,deviation,two_stage",
    ratio: Annotated[float, typer.Option(help="Share each may recompute.")] = 0.15,
    no_chat: o.NoChatOption = False,
    device: o.DeviceOption = None,
    as_json: o.JsonOption = False,
) -> None:
    """Show where reused KV is off, what policies repair, and what the question attends to."""
    from kvrag.bench.quality.contest import QualityOptions, contestants
    from kvrag.bench.quality.datasets import load_questions
    from kvrag.cli.opening import quiet_libraries

    names = tuple(part.strip() for part in policies.split(",") if part.strip())
    contestants(QualityOptions(policies=names or ("none",), ratios=(ratio,)))
    try:
        from kvrag.bench.inspection.picture import draw_inspection
    except ModuleNotFoundError as error:
        raise ParameterError(
            f"kvrag inspect needs {error.name}: pip install 'kvrag[bench]'"
        ) from error
    questions = load_questions(data, question + 1)
    if question >= len(questions):
        raise ParameterError(f"--question {question}: {data} has {len(questions)}, from 0")
    from kvrag.bench.inspection.measure import inspect_question
    from kvrag.models.kv_model import KVModel

    quiet_libraries()
    with console.working("inspecting"):
        found = inspect_question(
            KVModel.load(model, device=device),
            questions[question],
            names,
            ratio,
            use_chat_template=not no_chat,
        )
        paths = draw_inspection(found, folder)
    for path in paths:
        console.note(f"picture: {path}")
    if as_json:
        console.print_json(found)
    else:
        _print(found)


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
