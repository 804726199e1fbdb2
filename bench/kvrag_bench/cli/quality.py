"""`kvrag bench quality`: every policy and codec against full prefill, question by question."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvrag.cli import console, lists
from kvrag.cli import options as o
from kvrag.errors import ParameterError

if TYPE_CHECKING:
    from kvrag_bench.quality.rows import QualityRow


def bench_quality(
    model: o.NamedModelOption = "kvrag-tiny",
    data: Annotated[
        str,
        typer.Option(
            help="'generated' (unseen names), a JSON file in MuSiQue layout or a JSONL file in "
            "LongBench layout."
        ),
    ] = "generated",
    policies: Annotated[
        str, typer.Option(help="Policies to judge, with commas.")
    ] = "none,boundary,deviation,query,two_stage",
    ratios: Annotated[
        str, typer.Option(help="Shares of reused tokens to recompute, with commas.")
    ] = "0.05,0.15,0.3",
    codecs: Annotated[str, typer.Option(help="Codecs to store chunks with, with commas.")] = "raw",
    context: Annotated[
        str,
        typer.Option(
            help="Contexts to encode chunks with, with commas: none, document, neighbours (see "
            "'kvrag ingest'). With any but none, carried-over questions are also asked without "
            "their predecessor.",
            rich_help_panel=o.TUNING,
        ),
    ] = "none",
    compress: Annotated[
        str,
        typer.Option(
            help="How to store chunks, with commas: none, kvzip:RATE, drop:RATE, anchors:RATE "
            "(as in 'kvrag ingest'). Compressed ones are judged with policy none.",
            rich_help_panel=o.TUNING,
        ),
    ] = "none",
    eviction: Annotated[
        str,
        typer.Option(
            help="What to forget while answers are written, with commas: none, corm, streaming, "
            "h2o, snapkv, parameters follow colons (see 'kvrag query'). With none among them "
            "the others are also compared with it.",
            rich_help_panel=o.TUNING,
        ),
    ] = "none",
    links: Annotated[
        str | None,
        typer.Option(
            "--links",
            metavar="FILE|off",
            help="Link tokens ('kvrag train links'): judge every policy without and with them. "
            "Default: links.safetensors of the model's folder, where it has one.",
            show_default=False,
            rich_help_panel=o.TUNING,
        ),
    ] = None,
    questions: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of questions, from the first. Default: all; 1,000 if generated.",
            show_default=False,
        ),
    ] = None,
    max_tokens: o.MaxTokensOption = 16,
    seed: Annotated[
        int, typer.Option(help="Seed of the generated questions.", rich_help_panel=o.TUNING)
    ] = 2024,
    documents: Annotated[
        int,
        typer.Option(
            min=1, max=6, help="Chunks of a generated question.", rich_help_panel=o.TUNING
        ),
    ] = 5,
    picture: Annotated[
        Path | None,
        typer.Option(metavar="FILE.png", help="Also draw the rows.", show_default=False),
    ] = None,
    no_chat: o.NoChatOption = False,
    device: o.DeviceOption = None,
    as_json: o.JsonOption = False,
) -> None:
    """Measure the share of full prefill's quality that each policy and codec keeps."""
    names = lists.names(policies, "--policies")
    shares = lists.shares(ratios, "--ratios")
    stored = lists.names(codecs, "--codecs")
    contexts = lists.names(context, "--context")
    compressions = lists.names(compress, "--compress")
    evictions = lists.names(eviction, "--eviction")
    several = max(len(set(some)) for some in (contexts, compressions, evictions)) > 1
    if picture is not None and several:
        raise ParameterError(
            "--picture shows one context, one compression and one eviction: give one, or leave the "
            "picture out"
        )
    draw = None if picture is None else _drawing(picture)
    from kvrag.cli.opening import quiet_libraries
    from kvrag_bench.quality import contest

    quiet_libraries()
    options = contest.QualityOptions(
        model=model,
        data=data,
        policies=names,
        ratios=shares,
        codecs=stored,
        contexts=contexts,
        compressions=compressions,
        evictions=evictions,
        num_questions=questions,
        max_tokens=max_tokens,
        use_chat_template=not no_chat,
        seed=seed,
        num_documents=documents,
        device=device,
        links=links,
    )
    with console.progress("measuring") as say:
        rows = contest.run_quality_bench(options, on_progress=say)
    if draw is not None:
        draw(rows)
    if rows[0].num_left_out:
        console.note(
            f"{rows[0].num_left_out:,} questions were left out: their prompts do not fit the model"
        )
    if as_json:
        console.print_json(rows)
    else:
        _print_rows(rows)


def _drawing(picture: Path) -> Callable[[Sequence[QualityRow]], None]:
    """Return what draws, now that it is known to be able to: not after an hour of computing."""
    from kvrag_bench.quality.picture import check_picture_path, draw_quality

    check_picture_path(picture)

    def draw(rows: Sequence[QualityRow]) -> None:
        draw_quality(rows, picture)
        console.note(f"picture: {picture}")

    return draw


def _print_rows(rows: Sequence[QualityRow]) -> None:
    from rich.table import Table

    out = console.out()
    evicts = any(row.eviction != "none" for row in rows)
    for kind in dict.fromkeys(row.question_type for row in rows):
        mine = [row for row in rows if row.question_type == kind]
        first = mine[0]
        table = Table(box=None, pad_edge=False, header_style="bold", title_justify="left")
        table.title = f"{kind.replace('_', ' ')}, {first.num_questions:,} questions"
        table.add_column("policy", no_wrap=True)
        columns = ["EM", "to full (95 %)", "F1", "KL", "top-1", "TTFT", "again", "work", "B/token"]
        if first.rouge_l is not None:
            columns.insert(3, "ROUGE-L")
        if first.document_match is not None:
            columns.insert(1, "by documents")
        if evicts:
            columns[2:2] = ["kept", "to full cache (95 %)"]
        for name in columns:
            table.add_column(name, justify="right", no_wrap=True)
        table.add_row("full prefill", *_with_kept(_reference_cells(first), evicts), style="dim")
        for row in mine:
            table.add_row(_label(row, rows), *_with_kept(_cells(row), evicts, row))
        out.print(table)
        out.print()
    first = rows[0]
    if evicts:
        out.print(
            "kept: keys left of the prompts', mean over layers and heads; to full cache: exact "
            "match less that of the same policy that forgets nothing",
            style="dim",
            markup=False,
        )
    out.print(
        f"{first.model} on {first.dataset}; EM and F1 in %, its distance to full prefill with its "
        "paired bootstrap interval in points; KL to full prefill in nats and top-1 agreement over "
        "its answer; median TTFT; share of reused tokens "
        "computed again; rows computed over those of full prefill",
        style="dim",
        markup=False,
    )


def _reference_cells(row: QualityRow) -> list[str]:
    cells = [f"{row.reference_exact_match:.1%}", "", f"{row.reference_f1:.1%}"]
    if row.reference_document_match is not None:
        cells.insert(1, f"{row.reference_document_match:.1%}")
    if row.reference_rouge_l is not None:
        cells.append(f"{row.reference_rouge_l:.1%}")
    return [*cells, "", "", console.format_seconds(row.plain_ttft_seconds), "", "", ""]


def _with_kept(cells: list[str], evicts: bool, row: QualityRow | None = None) -> list[str]:
    """Return a row's cells with those of eviction among them, where any row evicts."""
    if not evicts:
        return cells
    if row is None:
        return [*cells[:2], "", "", *cells[2:]]
    compared = ""
    if row.full_cache_difference is not None:
        assert row.full_cache_low is not None
        assert row.full_cache_high is not None
        compared = _difference(row.full_cache_difference, row.full_cache_low, row.full_cache_high)
    return [*cells[:2], f"{row.kept_share:.0%}", compared, *cells[2:]]


def _difference(mean: float, low: float, high: float) -> str:
    # Adding 0.0 turns a rounded "-0.0" into "+0.0".
    shown = [round(100 * value, 1) + 0.0 for value in (mean, low, high)]
    return f"{shown[0]:+.1f} ({shown[1]:+.1f} to {shown[2]:+.1f})"


def _cells(row: QualityRow) -> list[str]:
    cells = [
        f"{row.exact_match:.1%}",
        _difference(row.exact_match_difference, row.difference_low, row.difference_high),
        f"{row.f1:.1%}",
    ]
    if row.document_match is not None:
        cells.insert(1, f"{row.document_match:.1%}")
    if row.rouge_l is not None:
        cells.append(f"{row.rouge_l:.1%}")
    return [
        *cells,
        f"{row.kl:.1e}" if 0 < row.kl < 1e-3 else f"{row.kl:.3f}",
        f"{row.top1_agreement:.1%}",
        console.format_seconds(row.ttft_seconds),
        f"{row.recomputed_share:.1%}",
        f"{row.work_share:.1%}",
        f"{row.bytes_per_token:,.0f}",
    ]


def _label(row: QualityRow, rows: Sequence[QualityRow]) -> str:
    label = row.policy if row.ratio is None else f"{row.policy} {row.ratio:.0%}"
    if len({other.codec for other in rows}) > 1:
        label += f", {row.codec}"
    if len({other.compression for other in rows}) > 1 or row.compression != "none":
        label += f", {row.compression}"
    if row.eviction != "none":
        label += f", {row.eviction}"
    if len({other.context for other in rows}) > 1:
        label += f", {row.context}"
    return label
