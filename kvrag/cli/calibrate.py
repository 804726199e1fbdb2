"""`kvrag calibrate` and `kvrag choose-store`: what policies lose, and which store is cheapest."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvrag.arguments import shown
from kvrag.cli import console
from kvrag.cli import options as o
from kvrag.cli.opening import open_index
from kvrag.errors import ParameterError
from kvrag.fusion.policies import DEFAULT_POLICY

if TYPE_CHECKING:
    from kvrag.fusion.controller import Calibration, Measured
    from kvrag.tune.stores import StoreChoice

_POLICIES = "none,boundary,deviation,query,query:shift=1,two_stage"


def calibrate(
    opening: o.Opening,
    questions: Annotated[int, typer.Option(min=1)] = 200,
    minutes: Annotated[float, typer.Option(min=0)] = 5.0,
    chunks: Annotated[int, o.setting(min=1)] = 5,
    policies: Annotated[str, o.setting()] = _POLICIES,
    ratios: Annotated[str, o.setting()] = "0.05,0.1,0.15,0.3",
    max_tokens: Annotated[int, o.setting("--max-tokens")] = 16,
    no_chat: o.NoChatOption = False,
    as_json: o.JsonOption = False,
) -> None:
    """Measure each policy's quality loss and cost with the index's model, and the store's speed.

    The result is saved in the index. 'kvrag query --policy auto' then picks a policy for each
    prompt: the cheapest one that loses under 1 %, or the best one that '--ratio' and
    'auto:ttft=SECONDS' allow. If several policies finish while KV loads, it picks the one that
    loses least.

    Parameters
    ----------
    questions
        The most questions to ask.
    minutes
        Ask no further question after this time, but at least eight.
    chunks
        Chunks in each prompt.
    policies
        Policies to measure, comma-separated.
    ratios
        Shares of reused tokens to recompute, comma-separated.
    max_tokens
        Maximum length of the answer, in tokens.
    """
    try:
        shares = tuple(map(float, ratios.split(",")))
    except ValueError as error:
        raise ParameterError(f"--ratios {shown(ratios)}: {error}; expected shares") from error
    from kvrag.ingest.upkeep import check_can_keep
    from kvrag.tune.calibrate import CalibrationOptions, usual_choice
    from kvrag.tune.calibrate import calibrate as measure

    options = CalibrationOptions(
        num_questions=questions,
        seconds=60 * minutes,
        num_chunks=chunks,
        max_tokens=max_tokens,
        policies=tuple(one.strip() for one in policies.split(",")),
        ratios=shares,
        use_chat_template=not no_chat,
    )
    with opening.open() as opened, console.progress("reading the index") as say:
        check_can_keep(opened.path)
        found = measure(opened, options, say)
        opened.upkeep.keep_calibration(found)
        usual = usual_choice(opened, found, chunks)
    if as_json:
        console.write(found.to_json())
    else:
        _print(found)
        if usual:
            console.write(_sentence(usual, max(2, chunks)))


def _sentence(usual: list[tuple[Measured, float]], chunks: int) -> str:
    """Return what is lost, at which speed, and what loses less, for people."""
    (chosen, speed), *better = usual
    less = "nothing that was measured loses less"
    for one, its_speed in better:
        less = f"{_name(one)} loses {one.loss:.1%}, {_soon(its_speed)}"
    return (
        f"With '--policy auto', {chosen.loss:.1%} of an answer's tokens differ from full "
        f"prefill's, and the first comes {_soon(speed)}, for a prompt of {chunks} "
        f"chunks of usual length ({_name(chosen)}); {less}. Without it, answers take "
        f"{DEFAULT_POLICY}.\n"
    )


def _soon(speed: float) -> str:
    """Return how many times sooner than full prefill's a first token comes, for people."""
    if not 0.05 < speed < 1000:  # a price came out as nothing
        return "at a time that so few questions do not tell"
    if round(speed, 1) == 1.0:
        return "about as soon"
    return f"about {speed:.1f} times sooner" if speed > 1 else f"about {1 / speed:.1f} times later"


def _name(one: Measured) -> str:
    return one.policy if one.ratio is None else f"{one.policy} at {one.ratio:.0%}"


def _print(found: Calibration) -> None:
    console.print_table(
        {"policy": "text", "ratio": "number", "loss": "number", "95 %": "number"},
        (
            (
                one.policy,
                "" if one.ratio is None else f"{one.ratio:.0%}",
                f"{one.loss:.1%}",
                f"{one.loss_low:.1%} to {one.loss_high:.1%}",
            )
            for one in sorted(found.policies, key=lambda one: one.loss)
        ),
    )
    console.write(
        f"{found.measure} over {console.count(found.num_questions, 'question')} from {found.data}, "
        "saved in the index\n"
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


def choose_store(
    stores: Annotated[str, typer.Option(metavar="URL|URL")],
    index: o.IndexOption = o.DEFAULT_INDEX,
    prices: Annotated[Path | None, typer.Option()] = None,
    loss: Annotated[float, o.setting(min=0.0, max=1.0)] = 0.01,
    reads: Annotated[float, o.setting(min=0.0)] = 30.0,
    move: Annotated[bool, typer.Option("--move")] = False,
    model: o.ModelOption = None,
    store: o.StoreSetting = None,
    as_json: o.JsonOption = False,
) -> None:
    """Choose the cheapest store that loads KV no slower than the model recomputes tokens.

    It measures each store; if all are slower, it chooses the fastest. Run 'kvrag calibrate' first:
    it measures what recomputing costs.

    Parameters
    ----------
    stores
        Stores to choose from (quote the list).
    prices
        File of store prices. Default: prices.toml in the index; if it is missing, it is created
        with example prices.
    loss
        Quality that may be lost, as a share, as for 'auto'.
    reads
        Number of reads of a chunk per month.
    move
        Move the index's KV to the chosen store.
    """
    from kvrag.ingest.config import write_atomically
    from kvrag.store.registry import check_kind
    from kvrag.tune.stores import EXAMPLES, FILE_NAME, measure_and_choose, read_prices, require_kv

    urls = stores.split("|")
    if any(not url or url.startswith(("tiered:", "memory:")) for url in urls):
        raise ParameterError(
            "--stores: expected persistent stores with | between them, no tiers and no memory; "
            "memory may be a tier before the chosen store"
        )
    for url in urls:
        check_kind(url)
    with open_index(index, model=model, store=store) as opened:
        require_kv(opened)  # before a file is written
        path = prices or opened.path / FILE_NAME
        if prices is None and not path.exists():
            write_atomically(path, EXAMPLES.encode())
            console.note(f"{path} contains example prices: replace them with yours")
        table = read_prices(path)
        moved = None
        with console.progress("measuring") as say:
            found = measure_and_choose(opened, urls, table, loss=loss, reads=reads, say=say)
            if move:
                moved = opened.upkeep.move(
                    urls[found.offers.index(found.chosen)],
                    on_progress=console.records(say),
                )
    if as_json:
        console.print_json({**found.to_dict(), "moved": None if moved is None else moved.to_dict()})
        return
    _print_choice(found)
    if moved is not None:
        size = console.format_bytes(moved.size_bytes)
        lost = f", {moved.num_lost:,} could not be read" if moved.num_lost else ""
        console.write(
            f"moved: {moved.num_records:,} records ({size}), {moved.num_present:,} already "
            f"there{lost}; run 'kvrag calibrate' to measure loading again\n"
        )


def _print_choice(found: StoreChoice) -> None:
    console.print_table(
        {"store": "folded", "load a chunk": "number", "hidden": "number", "a month": "number"},
        (
            (
                one.store,
                console.format_seconds(one.load_seconds),
                f"{one.hidden_share:.0%}",
                f"{one.month:.3g}",
            )
            for one in found.offers
        ),
    )
    console.write(console.harmless(f"{found.chosen.store}: {found.reason}\n"))
