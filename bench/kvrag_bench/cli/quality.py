"""`kvrag bench quality`: every policy and codec against full prefill, question by question."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvrag.cli import console
from kvrag.cli import options as o
from kvrag.errors import ParameterError
from kvrag_bench.cli import lists
from kvrag_bench.cli import options as b

if TYPE_CHECKING:
    from rich.table import Table

    from kvrag_bench.judge.effort import Effort
    from kvrag_bench.quality.rows import Estimate, QualityRow


def bench_quality(
    model: b.NamedModelOption = "kvrag-tiny",
    suite: Annotated[
        str | None,
        typer.Option(
            help="Judge on real text: 'real' for all sets of the real suite, or some of them with "
            "commas, as in 'biography:4,needle'. 'retrieved': a whole corpus is indexed, and each "
            "question finds its chunks in it.",
            show_default=False,
        ),
    ] = None,
    data: Annotated[
        str,
        typer.Option(
            help="'generated' (unseen names), a JSON file in MuSiQue layout or a JSONL file in "
            "LongBench layout. With --suite, a MuSiQue file that becomes one of its sets. With "
            "'retrieved', such a file, or a folder of pages, whose headings and first sentences "
            "are asked for. Default there: the handbook of the examples."
        ),
    ] = "generated",
    policies: Annotated[
        str, typer.Option(help="Policies to judge, with commas.")
    ] = "none,random,boundary,deviation,query,two_stage",
    ratios: Annotated[
        str, typer.Option(help="Shares of reused tokens to recompute, with commas.")
    ] = "0.05,0.15,0.3",
    codecs: Annotated[str, typer.Option(help="Codecs to store chunks with, with commas.")] = "raw",
    context: Annotated[
        str,
        typer.Option(
            help="Contexts to encode chunks with, with commas: none, filler[:TOKENS], "
            "document[:TOKENS], "
            "neighbours (see 'kvrag ingest'), and with 'retrieved' similar[:TOKENS]. "
            "With document or neighbours, carried-over questions "
            "are also asked without their predecessor."
        ),
    ] = "none",
    eviction: Annotated[
        str,
        typer.Option(
            help="What to forget while answers are written, with commas: none, corm, streaming, "
            "h2o, snapkv, parameters follow colons (see 'kvrag query'). With none among them "
            "the others are also compared with it."
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
        ),
    ] = None,
    writer: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A writer ('kvrag train writer'): judge every policy without and with it, over "
            "contexts filler and similar.",
            show_default=False,
        ),
    ] = None,
    questions: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of questions, from the first; with --suite, for each set. Default: "
            "all; 1,000 if generated; 50 for each set.",
            show_default=False,
        ),
    ] = None,
    max_tokens: o.MaxTokensOption = 16,
    seed: Annotated[int, typer.Option(help="Seed of the generated questions.")] = 2024,
    top: Annotated[
        str,
        typer.Option(help="With 'retrieved': numbers of chunks for each question, with commas."),
    ] = "4,6,10",
    chunk_tokens: Annotated[
        int, typer.Option(min=8, help="With 'retrieved': the longest chunk, in tokens.")
    ] = 256,
    documents: Annotated[
        int,
        typer.Option(min=1, max=6, help="Chunks of a generated question."),
    ] = 5,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.jsonl",
            help="Append each question's judgements to this file. What it holds already is not "
            "computed again, so a run continues where it stopped. 'retrieved' keeps its index "
            "in a folder beside it.",
            show_default=False,
        ),
    ] = None,
    noise_floor: Annotated[
        bool,
        typer.Option(
            "--noise-floor", help="Also judge full prefill in bfloat16: what rounding alone does."
        ),
    ] = False,
    picture: Annotated[
        Path | None,
        typer.Option(metavar="FILE.png", help="Also draw the rows.", show_default=False),
    ] = None,
    no_chat: o.NoChatOption = False,
    device: o.DeviceOption = None,
    compute: o.ComputeOption = None,
    as_json: o.JsonOption = False,
) -> None:
    """Measure the share of full prefill's quality that each policy and codec keeps."""
    names = lists.names(policies, "--policies")
    shares = lists.shares(ratios, "--ratios")
    stored = lists.names(codecs, "--codecs")
    contexts = lists.names(context, "--context")
    evictions = lists.names(eviction, "--eviction")
    if picture is not None and len(set(evictions)) > 1:
        raise ParameterError("--picture shows one eviction: give one, or leave the picture out")
    draw = None if picture is None else _drawing(picture)
    from kvrag.cli.opening import quiet_libraries
    from kvrag_bench.quality.contest import run_quality_bench
    from kvrag_bench.quality.entrants import QualityOptions

    quiet_libraries()
    options = QualityOptions(
        model=model,
        data=data,
        suite=() if suite is None else lists.names(suite, "--suite"),
        policies=names,
        ratios=shares,
        codecs=stored,
        contexts=contexts,
        evictions=evictions,
        num_questions=questions,
        max_tokens=max_tokens,
        use_chat_template=not no_chat,
        seed=seed,
        num_documents=documents,
        device=device,
        compute=compute,
        links=links,
        writer=writer,
        noise_floor=noise_floor,
        out=out,
        tops=lists.numbers(top, "--top"),
        chunk_tokens=chunk_tokens,
    )
    with console.progress("measuring") as say:
        efforts: list[Effort] = []
        rows = run_quality_bench(options, say, efforts.append)
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
        console.out().print(f"{efforts[0]}.", style="dim", markup=False)


def _drawing(picture: Path) -> Callable[[Sequence[QualityRow]], None]:
    """Return what draws, now that it is known to be able to: not after an hour of computing."""
    from kvrag_bench.quality.picture import check_picture_path, draw_quality

    check_picture_path(picture)

    def draw(rows: Sequence[QualityRow]) -> None:
        draw_quality(rows, picture)
        console.note(f"picture: {picture}")

    return draw


def _print_rows(rows: Sequence[QualityRow]) -> None:
    out = console.out()
    for kind in dict.fromkeys(row.question_type for row in rows):
        mine = [row for row in rows if row.question_type == kind]
        first = mine[0]
        title = f"{kind.replace('_', ' ')}, {first.num_questions:,} questions"
        out.print(f"{title} (full prefill answers {first.answered_share:.0%})", style="bold")
        for columns in (_DISTANCE, _ANSWERS):
            out.print(_table(columns, mine, rows))
            out.print()
    first = rows[0]
    out.print(
        f"{first.model} on {first.dataset}. work: rows computed over those of full prefill; again: "
        "share of reused tokens computed again; KL to full prefill in nats, gap: 1 less KL over "
        "that of plain reuse; top-1: agreement over full prefill's answer; agreed: its tokens "
        "before the first other one; TTFT: median. Answers: EM and F1 in %; *: of questions that "
        "full prefill answers; choice: the likeliest of the question's choices is right; gold: "
        "log-probability a token of the right answer less full prefill's. Differences to full "
        "prefill are paired, in points, with their 95 % bootstrap intervals.",
        style="dim",
        markup=False,
    )


_Cell = Callable[["QualityRow"], str | None]
"""Returns a row's figure; None where it has none. A column without figures is left out."""


def _share(value: Callable[[QualityRow], float | None]) -> _Cell:
    def cell(row: QualityRow) -> str | None:
        found = value(row)
        return None if found is None else f"{found:.1%}"

    return cell


def _points(value: Callable[[QualityRow], Estimate | None]) -> _Cell:
    def cell(row: QualityRow) -> str | None:
        found = value(row)
        if found is None:
            return None
        # Adding 0.0 turns a rounded "-0.0" into "+0.0".
        mean, low, high = (round(100 * one, 1) + 0.0 for one in (found.mean, found.low, found.high))
        return f"{mean:+.1f} ({low:+.1f} to {high:+.1f})"

    return cell


def _kl(value: float) -> str:
    return f"{value:.1e}" if 0 < value < 1e-3 else f"{value:.3f}"


def _gap(row: QualityRow) -> str | None:
    gap = row.gap_closed
    if gap is None:
        return None
    if gap.mean < -1:
        return "below -100%"
    return f"{gap.mean:.0%} ({gap.low:.0%} to {gap.high:.0%})"


def _nothing(_: QualityRow) -> None:
    return None


# Heading, a contestant's figure, full prefill's.
_DISTANCE: tuple[tuple[str, _Cell, _Cell], ...] = (
    ("work", _share(lambda row: row.work_share), _nothing),
    ("again", _share(lambda row: row.recomputed_share), _nothing),
    ("KL", lambda row: _kl(row.kl), _nothing),
    ("first", lambda row: _kl(row.first_kl), _nothing),
    ("gap closed (95 %)", _gap, _nothing),
    ("top-1", _share(lambda row: row.top1_agreement), _nothing),
    ("agreed", lambda row: f"{row.agreed_tokens:.1f}", _nothing),
    ("kept", lambda row: None if row.eviction == "none" else f"{row.kept_share:.0%}", _nothing),
    (
        "TTFT",
        lambda row: console.format_seconds(row.ttft_seconds),
        lambda row: console.format_seconds(row.plain_ttft_seconds),
    ),
    ("B/token", lambda row: f"{row.bytes_per_token:,.0f}", _nothing),
)
_ANSWERS: tuple[tuple[str, _Cell, _Cell], ...] = (
    ("choice", _share(lambda row: row.choice), _share(lambda row: row.reference_choice)),
    ("to full (95 %)", _points(lambda row: row.choice_difference), _nothing),
    ("gold", lambda row: f"{row.gold.mean:+.2f}", _nothing),
    ("EM", _share(lambda row: row.exact_match), _share(lambda row: row.reference_exact_match)),
    (
        "by documents",
        _share(lambda row: row.document_match),
        _share(lambda row: row.reference_document_match),
    ),
    ("to full (95 %)", _points(lambda row: row.exact_match_difference), _nothing),
    ("to full cache (95 %)", _points(lambda row: row.full_cache_difference), _nothing),
    ("F1*", _share(lambda row: row.answered_f1), _share(lambda row: row.reference_answered_f1)),
    (
        "contains*",
        _share(lambda row: None if row.answered_contains is None else row.answered_contains.mean),
        _share(lambda _: 1.0),
    ),
    ("ROUGE-L", _share(lambda row: row.rouge_l), _share(lambda row: row.reference_rouge_l)),
)


def _table(
    columns: Sequence[tuple[str, _Cell, _Cell]],
    mine: Sequence[QualityRow],
    rows: Sequence[QualityRow],
) -> Table:
    """Return one question type's rows as a table, without the columns that would be empty."""
    from rich.table import Table

    shown = [column for column in columns if any(column[1](row) is not None for row in mine)]
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("policy")
    for heading, _, _ in shown:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_row("full prefill", *(full(mine[0]) or "" for _, _, full in shown), style="dim")
    for row in mine:
        name = _label(row, rows)
        if row.num_questions != mine[0].num_questions:
            name += f" (on {row.num_questions:,})"
        table.add_row(name, *(cell(row) or "" for _, cell, _ in shown))
    return table


def _label(row: QualityRow, rows: Sequence[QualityRow]) -> str:
    from kvrag_bench.quality.entrants import NO_DOCUMENT, NOISE_FLOOR

    label = row.policy if row.ratio is None else f"{row.policy} {row.ratio:.0%}"
    if row.policy in (NO_DOCUMENT, NOISE_FLOOR):
        return label
    if len({other.codec for other in rows}) > 1:
        label += f", {row.codec}"
    if row.eviction != "none":
        label += f", {row.eviction}"
    if len({other.context for other in rows}) > 1:
        label += f", {row.context}"
    return label
