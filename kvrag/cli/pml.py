"""`kvrag pml`: check, encode and run prompts written as modules."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvrag.cli import console
from kvrag.cli import options as o
from kvrag.cli.answering import answer, report_line
from kvrag.cli.opening import quiet_libraries

if TYPE_CHECKING:
    from kvrag.pml.layout import SchemaLayout
    from kvrag.pml.schema import Schema

FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="A schema file.")]
PromptArgument = Annotated[Path, typer.Argument(metavar="FILE", help="A prompt file.")]
SchemaOption = Annotated[
    Path, typer.Option("--schema", "-s", metavar="FILE", help="The prompt's schema file.")
]


def check(
    file: FileArgument,
    model: Annotated[str | None, typer.Option("--model", "-m")] = None,
    as_json: o.JsonOption = False,
) -> None:
    """Check a schema; with a model, show the positions of its modules.

    Parameters
    ----------
    model
        Also lay the schema out with the tokenizer of this model: folder, hub name or 'kvrag-tiny'.
    """
    from kvrag.pml.parser import parse_schema

    schema = parse_schema(file)
    layout = None if model is None else _lay_out(schema, model)
    if as_json:
        console.print_json(_described(schema, layout))
        return
    console.write(
        f"{file}: schema {schema.name}, {console.count(len(schema.modules), 'module')}, "
        f"{console.count(len(schema.scaffolds), 'scaffold')}\n"
    )
    if layout is None:
        return
    for path in schema.modules:
        start, end = layout.extents[path]
        console.write(f"  {start:>7} to {end:>7}  {'/'.join(path)}\n")
    console.write(f"  {console.count(layout.num_positions, 'position')} in all\n")


def _lay_out(schema: Schema, model: str) -> SchemaLayout:
    from kvrag.models.loading import load_tokenizer, shared_prefix_ids
    from kvrag.pml.layout import lay_out_schema

    quiet_libraries()
    tokenizer = load_tokenizer(model)
    return lay_out_schema(schema, tokenizer, shared_prefix_ids(tokenizer))


def _described(schema: Schema, layout: SchemaLayout | None) -> dict[str, object]:
    modules = []
    for path in schema.modules:
        one: dict[str, object] = {
            "path": "/".join(path),
            "parameters": {name: p.length for name, p in schema.parameters(path).items()},
        }
        if layout is not None:
            one["start"], one["end"] = layout.extents[path]
        modules.append(one)
    return {
        "schema": schema.name,
        "modules": modules,
        "scaffolds": [["/".join(path) for path in one.paths] for one in schema.scaffolds],
        "num_positions": None if layout is None else layout.num_positions,
    }


def encode(file: FileArgument, opening: o.Opening, as_json: o.JsonOption = False) -> None:
    """Compute and store the KV of the schema's modules that are not stored yet."""
    from kvrag.engine.engine import KVEngine
    from kvrag.pml.engine import PMLEngine
    from kvrag.pml.parser import parse_schema

    schema = parse_schema(file)
    with opening.open() as opened, console.progress("loading the model") as say:
        report = PMLEngine(KVEngine(opened)).encode(schema, console.records(say))
    if as_json:
        console.print_json(report)
        return
    console.write(
        f"schema {schema.name}: {console.count(report.num_tokens, 'token')} in "
        f"{console.count(report.num_passages, 'passage')}; "
        f"{console.count(report.num_tokens_computed, 'token')} computed, "
        f"{console.format_bytes(report.size_bytes)} stored in "
        f"{console.format_seconds(report.seconds)}\n"
    )


def run(
    file: PromptArgument,
    schema: SchemaOption,
    opening: o.Opening,
    answering: o.Answering,
    sampled: o.Sampled,
    policy: o.PolicyOption = "none",  # noqa: ARG001 - the group's, with another default
    as_json: o.JsonOption = False,
) -> None:
    """Answer a prompt; modules that are not encoded yet are computed and reported."""
    from kvrag.pml.engine import PMLEngine

    with opening.open() as opened:
        pml = PMLEngine(answering.engine(opened))
        pml.add(schema)
        with console.working("loading the model"):
            placed = pml.place(file)
            _ = opened.model
        on_text = console.AnswerText(quiet=as_json)
        final = answer(pml.engine, placed, on_text, **sampled.values)
        on_text.end()
    if as_json:
        console.print_json(final.to_dict())
    else:
        console.out().print(f"  {report_line(final)}", style="dim", markup=False, soft_wrap=True)
