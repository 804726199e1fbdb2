"""The fuser: turns a laid-out prompt and stored chunks into the prompt's KV and first logits.

It passes through the layers once, so the weights are read once. In each layer it places the stored
rows. Then it computes over them everything that is not stored (question, separators, misses),
together with the tokens that the policy recomputes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from kvrag.errors import ParameterError
from kvrag.fusion.controller import Choice
from kvrag.fusion.layout import Layout
from kvrag.fusion.linked_rows import LinkedRows
from kvrag.fusion.links import LinkTokens
from kvrag.fusion.loader import OpenKV, SpanLoader, Target
from kvrag.fusion.plan import FusePlan, Loading, plan_fusion
from kvrag.fusion.policies.base import NonePolicy, RecomputePolicy, mean_count
from kvrag.fusion.repair import ChunkShift, Repair
from kvrag.fusion.report import FusionReport
from kvrag.fusion.selection import Joining, QuestionAttention, Selection, ask
from kvrag.fusion.slices import (
    Clock,
    LostError,
    Slices,
    in_background,
    in_one_go,
    joined,
    slice_rows,
    until,
    without_lost,
)
from kvrag.kvcache import FusedKV
from kvrag.loading.cost import ChunkDecision
from kvrag.models.adapter import without_adapters
from kvrag.models.attention import last_row, num_before, rows_on
from kvrag.models.batched_prefill import meets, share_of
from kvrag.models.kv_model import KVModel
from kvrag.models.rowgraphs import CapturedLayers
from kvrag.models.rows import Attending, RowPass
from kvrag.models.writers import CACHE_ARGUMENT, Deviation
from kvrag.positions.rotary import RotaryTable

FOUND = "found, but computed"
"""The reason of fresh tokens that are stored: their record is lost, or was slower to load."""
OUTPRICED = "found, but full prefill is faster"
"""The reason of fresh tokens that are stored, in a prompt that is computed as a whole."""
MADE = "computed to be stored"
"""The reason of fresh tokens whose record the store lacked, and gets now."""


@dataclass(frozen=True)
class FusedPrompt:
    """A prompt ready for generation.

    Attributes
    ----------
    kv
        KV of all N prompt tokens, including link tokens, with room for the answer.
    logits
        ``[vocabulary]`` in the model's dtype: the distribution of the first answer token; of no
        meaning if the model's `KVModel.layer_stop` leaves out layers.
    report
        The account of the fusion.
    fresh
        ``[m]``: ascending positions of the computed rows that were not in the store.
    picks
        For each layer ``[n]``: ascending positions of the reused tokens recomputed in it.
    layout
        The fused layout, which describes the rows of `kv`.
    links
        The layout's links, on the model's device; None if the layout has none.
    hidden
        ``[1, hidden]``: the last layer's output for the last row, of which `logits` are made, until
        a card's next pass; None for a prompt computed as a whole.
    """

    kv: FusedKV
    logits: torch.Tensor
    report: FusionReport
    fresh: torch.Tensor
    picks: tuple[torch.Tensor, ...]
    layout: Layout
    links: LinkTokens | None = None
    hidden: torch.Tensor | None = None

    @contextmanager
    def answering(self, model: KVModel) -> Iterator[None]:
        """Let the model's own forward passes use the prompt's adapter."""
        adapting = (
            without_adapters(model.decoder) if self.links is None else self.links.answering(model)
        )
        with model.lock, adapting:
            yield

    def to_generate(self) -> dict[str, Any]:
        """Return the arguments with which Transformers' ``generate`` continues this prompt.

        ``generate`` computes the prompt's last token again, to get the first logits itself. It
        derives positions from the number of ids, but the buffer has more rows than the prompt has
        tokens if there are link tokens. So copies of the first id are added at the beginning.

        Raises
        ------
        ParameterError
            If the prompt's positions have gaps (markup), which ``generate`` does not support.
        """
        if self.layout.positions is not None:
            raise ParameterError(
                "this prompt's positions have gaps, which Transformers' generate does not support: "
                "answer it with KVEngine"
            )
        from kvrag.models.caches import FusedCache

        num_rows = self.kv.num_tokens
        token_ids = self.layout.plain_token_ids[-num_rows:]
        added = token_ids[:1] * (num_rows - len(token_ids))
        input_ids = torch.tensor([[*added, *token_ids]], device=self.logits.device)
        return {
            "input_ids": input_ids,
            # By default it is derived from the ids, but a prompt may begin with a padding id.
            "attention_mask": torch.ones_like(input_ids),
            CACHE_ARGUMENT: FusedCache(self.kv, num_rows - 1),
        }


def fuse_in_slices(
    model: KVModel,
    layout: Layout,
    open_kv: OpenKV,
    choice: Choice | RecomputePolicy,
    fused: FusedKV,
    links: LinkTokens | None = None,
    loading: Loading = Loading(),  # noqa: B008  # frozen
) -> Slices[FusedPrompt]:
    """Fill a buffer with the KV of a whole prompt, computing only what is not stored, in slices.

    It pauses after each layer, or on the CPU after 256 rows. The caller may compute other prompts
    meanwhile: this holds the model only while it computes.

    Parameters
    ----------
    model
        The model that the chunks were encoded with.
    layout
        The prompt's tokens and its stored spans.
    open_kv
        Opens a chunk's record; records that it cannot deliver are prefilled and counted.
    choice
        Which reused tokens to recompute (CacheBlend §4, and others), and how attention treats
        the rest; or the controller that chooses both.
    fused
        The buffer, on the model's device, made for the layout's number of tokens.
    links
        The result of `LinkTokens.on` for the model, if the layout has link tokens (KVLink §3.3).
    loading
        How to load stored KV.
    """
    clock = Clock()
    if isinstance(choice, RecomputePolicy):
        choice = Repair(choice)
    plan = plan_fusion(model, layout, choice, loading)
    clock.lap("select")
    linked = LinkedRows(model, plan.layout, links)
    loader = _loader_of(model, plan, open_kv, loading)

    def attempt(plan: FusePlan) -> Slices[tuple[FusedPrompt, FusePlan]]:
        return (yield from execute(model, plan, loader, linked, fused, clock)), plan

    def without(plan: FusePlan, error: LostError) -> FusePlan:
        clock.lap("lost")
        return plan.without(error.lost)

    try:
        made, plan = yield from without_lost(plan, attempt, without)
    finally:
        # The buffer's next user must not have anything written into it.
        loader.end()
    # Making a record is computing, and opening had to wait for it.
    clock.move("load", "compute", sum(loader.made_seconds.values()))
    told: dict[str, Any] = {
        "hidden_load_seconds": loader.hidden_seconds,
        "num_decoded_by_host": loader.num_decoded_by_host,
        "decisions": tuple(_with_outcomes(plan, loader, made.report)),
    }
    if loading.hot is not None:
        told["hot_chunks"] = dict(loading.hot.num_found)
        told["hot_bytes"] = dict(loading.hot.bytes_found)
    if loading.streaming is not None:
        assert loader.stream_report is not None
        computed = computing_seconds(clock.seconds)
        told["stream"] = loading.streaming.closing(loader.stream_report, computed)
    return replace(made, report=replace(made.report, **told))


fuse = in_one_go(fuse_in_slices)
"""Does what `fuse_in_slices` does, without a pause."""


def computing_seconds(seconds: Mapping[str, float]) -> float:
    """Return the part of a report's seconds that computing took."""
    return sum(seconds.get(stage, 0.0) for stage in ("ask", "select", "compute"))


def _loader_of(model: KVModel, plan: FusePlan, open_kv: OpenKV, loading: Loading) -> SpanLoader:
    if model.ranks.size > 1 and (loading.streaming is not None or plan.layout.links):
        raise ParameterError(
            f"{model.ranks.size} processes compute the model together: a target for the first "
            "token (ttft) and link tokens need one process; leave them out (links='off')"
        )
    target = None
    if loading.streaming is not None:
        target = Target(loading.streaming, plan.num_planned_rows)
    return SpanLoader(open_kv, loading.num_threads, model.ranks, target, loading.hot)


def _with_outcomes(
    plan: FusePlan, loader: SpanLoader, report: FusionReport
) -> Iterator[ChunkDecision]:
    num_rows = sum(report.rows_by_layer)
    seconds_per_row = report.seconds["compute"] / num_rows if num_rows else 0.0
    loaded = {span.record_id for span in plan.spans}
    for record, decision in plan.decisions.items():
        seconds: float | None
        if decision.is_computed:
            seconds = seconds_per_row * len(report.rows_by_layer) * decision.num_tokens
        else:
            seconds = loader.record_seconds[record] if record in loaded else None
        yield replace(decision, seconds=seconds)


def execute(
    model: KVModel,
    plan: FusePlan,
    loader: SpanLoader,
    linked: LinkedRows,
    fused: FusedKV,
    clock: Clock,
) -> Slices[FusedPrompt]:
    """Carry out a plan in one pass through the layers, in slices.

    Raises
    ------
    LostError
        If records of the plan are not available: plan again without them.
    """
    layout, repair = plan.layout, plan.repair
    tables = model.tables(len(layout.token_ids), layout.positions)
    fresh = rows_on(model.device, plan.fresh)
    try:
        # Loading starts before the model is free: another prompt may be using it.
        num_layers = max(model.layer_stop, plan.question_layers.stop)
        yield from _begin(loader, plan, fused, tables[:num_layers], clock)
    finally:
        clock.lap("load")
    rows_by_layer = []
    computing = partial(model.computing_rows, linked.adapter, fresh)
    prompt, asked = plan.prompt, plan.question_layers
    compiled = None
    if linked.adapter is None:
        with model.lock:
            compiled = model.compile()
    if asked:
        positions = prompt.reused().to(model.device)
        kept = repair.policy.kept_layers(plan.num_layers)
        num_tokens = len(layout.token_ids)
        attention = QuestionAttention(positions, plan.question_start, asked, num_tokens, kept)
        asking = RowPass(fresh, fused, tables, compiled)
        early, late = yield from ask(model, linked, attention, loader, asking, clock)
        prompt = replace(prompt, relevance=attention.relevance)
    # Without inexact spans there is nothing to choose from.
    policy = repair.policy if plan.inexact else NonePolicy()
    with computing():
        changes_from: int | None = None
        joining: tuple[Joining, ...] = ()
        if 0 < asked.stop < model.layer_stop:
            split = num_before(fresh, min(plan.question_start, int(plan.fresh[-1])))
            leading, question = (
                rows_on(model.device, one) for one in plan.fresh.tensor_split([split])
            )
            joining = (
                Joining(asked.stop, leading, late[:split]),
                Joining(kept, question, early[split:]),
            )
        elif asked:
            # Nothing before this row changes after the look; the last row gives the logits.
            changes_from = plan.inexact[0].prompt_start if repair.shift else int(plan.fresh[-1])
        selection = Selection(policy, prompt, fresh, changes_from, joining)
        shift = None
        if repair.shift and plan.inexact:
            shift = ChunkShift(plan.inexact, len(layout.token_ids), model.device, repair.shift)
        hidden = linked.embed(selection.rows)
    of = RowPass(selection.rows, fused, tables, compiled)
    clock.lap("select")
    last_layer = model.layer_stop - 1
    size = slice_rows(model.device)
    captured = compiled if isinstance(compiled, CapturedLayers) and shift is None else None
    layers = range(0)

    def run_together() -> None:
        assert captured is not None
        captured.run_together(together, hidden, rows, fused, tables)

    def run_alone() -> None:
        if together:
            run_together()
        else:
            forward(slice(0, size))

    while layers.stop <= last_layer:
        layer_index = layers.stop
        layers, together, share = range(layer_index, layer_index + 1), range(0), None
        yield from loader.bring(layers, clock)
        with computing():
            hidden = selection.enter(layer_index, model, hidden, of)
            clock.lap("select")
            rows = selection.rows
            of = of.over(rows)
            if captured is not None:
                together = captured.together(layer_index, rows)
                if together.stop > last_layer or not selection.stays(together):
                    together = range(0)
            is_open = bool(together)
            if together and together.stop <= loader.num_loaded and not meets():
                run_together()
                layers, is_open = together, False
            elif not together:
                changed = None
                if shift is not None:
                    table, picked = tables[layer_index], selection.picks[-1]
                    changed = shift.of_layer(fused, layer_index, table, picked)
                if layer_index == last_layer:
                    # Only the last token's output is needed; the other rows need only their K/V.
                    model.rows.write(layer_index, hidden, of, changed=changed)
                    hidden, rows = hidden[-1:].contiguous(), last_row(rows)
                    of = of.over(rows)
                    noted = changed = None
                else:
                    noted = selection.noting(layer_index)
                run = partial(model.rows.forward, layer_index, attending=Attending(changed=changed))
                forward = partial(_forward_slice, run, hidden, of, noted)
                if changed is None and noted is None and len(rows) <= size:
                    share = share_of(model, layers, hidden, of)
                if share is None:
                    run_alone()
        clock.lap("compute")
        if is_open:
            # A card computes them at once.
            layers = together
            yield from loader.bring(layers, clock)
            share = share_of(model, layers, hidden, of, is_captured=True)
            if share is None:
                with computing():
                    run_alone()
                clock.lap("compute")
        if share is not None:
            yield from joined(share, computing, run_alone, clock, "compute")
        selection.picks += selection.picks[-1:] * (len(layers) - 1)
        rows_by_layer += [len(selection.rows)] * len(layers)
        for begin in () if together else range(size, len(rows), size):
            yield False
            clock.resume()
            with computing():
                forward(slice(begin, begin + size))
            clock.lap("compute")
        if share is None:
            yield False
            clock.resume()
    with computing():
        logits = model.logits(hidden)[0]
    clock.lap("compute")
    # A card has told this before it begins with the last layers: nobody waits for it in vain.
    yield from until(loader.is_sound, clock)
    loader.check()
    clock.lap("load")
    picks = tuple(selection.picks)
    report = _report(plan, loader, clock, tuple(rows_by_layer), len(fresh), picks)
    report = replace(report, rows_compared=selection.num_compared, compute=model.compute)
    return FusedPrompt(fused, logits, report, fresh, picks, layout, linked.links, hidden)


def fused_again(
    model: KVModel, layout: Layout, choice: Choice, fused: FusedKV, hidden: torch.Tensor
) -> FusedPrompt:
    """Return a prompt all of whose rows are kept, with the last one's output."""
    clock, hidden = Clock(), hidden.to(model.device)  # the model may have moved
    none = torch.empty(0, dtype=torch.long, device=model.device)
    with model.computing_rows():
        logits = model.logits(hidden)[0]
    clock.lap("compute")
    num_layers = model.layer_stop
    report = FusionReport.of(
        *(layout, str(choice)),
        num_kept=len(layout.token_ids),
        seconds=clock.seconds,
        rows_by_layer=(0,) * num_layers,
        compute=model.compute,
    )
    return FusedPrompt(fused, logits, report, none, (none,) * num_layers, layout, None, hidden)


def _forward_slice(
    run: Callable[..., None],
    hidden: torch.Tensor,
    of: RowPass,
    noted: Deviation | None,
    block: slice,
) -> None:
    """Run one layer over the rows of one slice."""
    run(hidden[block], of.part(block), deviation=None if noted is None else noted[block])


def _begin(
    loader: SpanLoader, plan: FusePlan, fused: FusedKV, tables: Sequence[RotaryTable], clock: Clock
) -> Slices[None]:
    """Open the plan's records, and begin to load them."""
    unneeded = dict.fromkeys(plan.inexact, plan.num_whole_layers)

    def bring() -> None:
        loader.open(plan.spans)
        loader.stream(fused, tables)

    if loader.waits:
        yield from in_background(bring, clock)
    else:
        bring()
    loader.begin(fused, tables, unneeded)


def _report(
    plan: FusePlan,
    loader: SpanLoader,
    clock: Clock,
    rows_by_layer: tuple[int, ...],
    num_fresh_rows: int,
    picks: Sequence[torch.Tensor],
) -> FusionReport:
    layout, prompt, expected = plan.layout, plan.prompt, plan.expected
    made = [span for span in plan.spans if span.record_id in loader.made_seconds]
    num_made = sum(span.length for span in made)
    num_exact = sum(span.length for span in plan.exact) - num_made
    rows_made = loader.num_tokens(span.record_id for span in made)
    # Most layers have the same tensor, whose length takes a microsecond.
    lengths = {key: len(one) for key, one in {id(one): one for one in picks}.items()}
    num_recomputed = mean_count([lengths[id(one)] for one in picks])
    num_plain = len(layout.token_ids) - len(layout.links)
    num_fresh = num_plain - layout.num_kept - num_exact - prompt.num_reused
    reasons = dict(layout.fresh_reasons)
    num_more = num_fresh - num_made - sum(reasons.values())
    if reasons and num_made:
        reasons[MADE] = num_made
    if reasons and num_more > 0:  # spans that a miss or a decision left out
        reasons[OUTPRICED if plan.num_outpriced else FOUND] = num_more
    return FusionReport.of(
        *(layout, str(plan.repair)),
        num_exact=num_exact,
        num_reused=prompt.num_reused - num_recomputed,
        num_recomputed=num_recomputed,
        num_fresh=num_fresh,
        num_kept=layout.num_kept,
        num_in_context=sum(span.length for span in plan.spans if span.context_ids),
        num_chunks=len({span.chunk_id for span in plan.spans if span not in made}),
        num_made=num_made,
        bytes_loaded=loader.bytes_loaded,
        seconds=clock.seconds,
        rows_by_layer=tuple(rows + rows_made for rows in rows_by_layer),
        rows_asked=num_fresh_rows * plan.question_layers.stop,
        num_links=len(layout.links),
        num_unlinked=layout.num_unlinked,
        num_outpriced=plan.num_outpriced,
        misses=plan.misses,
        expected_loss=expected.loss,
        expected_seconds=expected.seconds,
        expected_load_seconds=expected.load_seconds,
        fresh_reasons=reasons,
    )
