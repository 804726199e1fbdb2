"""`kvrag calibrate`: measure each policy's quality loss with a model, for policy ``auto``."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from kvrag.cli import console, lists
from kvrag.cli import options as o
from kvrag.fusion.policies import DEFAULT_POLICY
from kvrag.ingest.contexts import CORPUS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvrag.fusion.calibration import Calibration
    from kvrag.tune.contexts import ContextLoss

_POLICIES = "none,boundary,deviation,query,query:shift=1,two_stage"


def calibrate(
    index: o.IndexOption = o.DEFAULT_INDEX,
    data: Annotated[
        str | None,
        typer.Option(
            help="Questions with answers: a JSON file in MuSiQue layout or a JSONL file in "
            "LongBench layout. Default: questions that quote the index; their answers are compared "
            "with those of full prefill.",
            rich_help_panel=o.TUNING,
            show_default=False,
        ),
    ] = None,
    questions: Annotated[int, typer.Option(min=1, help="The most questions to ask.")] = 200,
    minutes: Annotated[
        float,
        typer.Option(min=0, help="Ask no further question after this time, but at least eight."),
    ] = 5.0,
    contexts: Annotated[
        str | None,
        typer.Option(
            help="Also compare these contexts with the index's own, comma-separated, such as "
            "'none,corpus': how far answers are from full prefill's. Takes as long again.",
            rich_help_panel=o.TUNING,
            show_default=False,
        ),
    ] = None,
    chunks: Annotated[
        int,
        typer.Option(
            min=1,
            help="Chunks in each prompt; with --data, the data sets it.",
            rich_help_panel=o.RESEARCH,
        ),
    ] = 5,
    policies: Annotated[
        str,
        typer.Option(help="Policies to measure, comma-separated.", rich_help_panel=o.RESEARCH),
    ] = _POLICIES,
    ratios: Annotated[
        str,
        typer.Option(
            help="Shares of reused tokens to recompute, comma-separated.",
            rich_help_panel=o.RESEARCH,
        ),
    ] = "0.05,0.1,0.15,0.3",
    max_tokens: Annotated[
        int,
        typer.Option(
            "--max-tokens",
            help="Maximum length of the answer, in tokens.",
            rich_help_panel=o.RESEARCH,
        ),
    ] = 16,
    model: o.ModelOption = None,
    store: o.StoreOption = None,
    no_chat: o.NoChatOption = False,
    device: o.DeviceOption = None,
    as_json: o.JsonOption = False,
) -> None:
    """Measure each policy's quality loss and cost with the index's model, and the store's speed.

    The result is saved in the index. 'kvrag query --policy auto' then picks a policy for each
    prompt: the cheapest one that loses under 1 %, or the best one that '--ratio' and
    'auto:ttft=SECONDS' allow. If several policies finish while KV loads, it picks the one that
    loses least.
    """
    named = tuple(lists.names(policies, "policies"))
    shares = lists.shares(ratios, "ratios")
    compared = () if contexts is None else lists.names(contexts, "contexts")
    from kvrag.cli.opening import open_index
    from kvrag.ingest.calibrations import check_can_keep
    from kvrag.tune.calibrate import CalibrationOptions, usual_choice
    from kvrag.tune.calibrate import calibrate as measure
    from kvrag.tune.contexts import check_contexts, compare_contexts

    options = CalibrationOptions(
        data=data,
        num_questions=questions,
        seconds=60 * minutes,
        num_chunks=chunks,
        max_tokens=max_tokens,
        policies=named,
        ratios=shares,
        use_chat_template=not no_chat,
    )
    with (
        open_index(index, model, device, store) as opened,
        console.progress("reading the index") as say,
    ):
        check_can_keep(opened.path)
        check_contexts(opened, compared, options)
        found = measure(opened, options, say)
        opened.upkeep.keep_calibration(found)
        usual = usual_choice(opened, found, chunks)
        losses = compare_contexts(opened, compared, options, say) if compared else []
    if as_json:
        measured = json.loads(found.to_json())
        if losses:
            measured["contexts"] = [asdict(one) for one in losses]
        console.write(json.dumps(measured, indent=1) + "\n")
    else:
        _print(found)
        if usual is not None:
            repair, expected = usual
            console.write(
                f"'--policy auto' takes {repair} for a prompt of {max(2, chunks)} chunks of usual "
                f"length, and expects to lose {expected.loss:.1%}; without it, answers take "
                f"{DEFAULT_POLICY}\n"
            )
        if losses:
            _print_contexts(losses)


def _print(found: Calibration) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("policy", no_wrap=True)
    for name in ("ratio", "loss", "95 %"):
        table.add_column(name, justify="right", no_wrap=True)
    for measured in sorted(found.policies, key=lambda measured: measured.loss):
        table.add_row(
            measured.policy,
            "" if measured.ratio is None else f"{measured.ratio:.0%}",
            f"{measured.loss:.1%}",
            f"{measured.loss_low:.1%} to {measured.loss_high:.1%}",
        )
    console.out().print(table)
    console.write(
        f"{found.measure} over {found.num_questions:,} questions from {found.data}, saved in the "
        "index\n"
    )
    if found.loading is None:
        console.write("loading: not measured, the store returned no records\n")
    else:
        for tier in found.loading.tiers:
            console.write(
                f"loading from {tier.store}: "
                f"{console.format_seconds(tier.seconds_per_record)} per chunk plus "
                f"{console.format_seconds(1000 * tier.seconds_per_token)} per thousand tokens\n"
            )


def _print_contexts(losses: Sequence[ContextLoss]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("\nchunks encoded after", no_wrap=True)
    table.add_column("KL, nothing\nrecomputed", justify="right")
    table.add_column(f"KL,\n{DEFAULT_POLICY}", justify="right")
    table.add_column("\nof the index's", justify="right")
    for one in losses:
        share = f"{one.share_low:.0%} to {one.share_high:.0%}"
        table.add_row(
            one.context,
            f"{one.reused:.3f}",
            f"{one.repaired:.3f}",
            "" if one is losses[0] else share,
        )
    console.out().print()
    console.out().print(table)
    own, best = losses[0], min(losses, key=lambda one: one.repaired)
    if best.share_high < 1:
        advice = f"an index made with '--context {best.context}' would lose less"
        if best.context.startswith(CORPUS):
            advice += ", but choose it only if you trust all documents (docs/contexts.md)"
    else:
        advice = f"no context is clearly better than the index's own, {own.context}"
    console.write(f"KL is the divergence from full prefill, in nats a token: {advice}\n")
