"""Planning a fusion: every decision that is made before anything is computed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from kvrag.fusion.controller import Choice, Expected, LoadingController
from kvrag.fusion.layout import Layout, RecordId, ReusedSpan
from kvrag.fusion.policies.base import NonePolicy, PromptRows, num_whole_layers, planned_rows
from kvrag.fusion.pricing import Pricing
from kvrag.fusion.repair import Repair
from kvrag.fusion.staging import HotRecords
from kvrag.loading import LOAD_THREADS, threads
from kvrag.loading.cost import ChunkDecision, StoredRows
from kvrag.loading.streaming import Streaming
from kvrag.models.kv_model import KVModel

MISS_POSITION = "encoded at another position"

TierOf = Callable[[str, tuple[int, ...]], int | None]
"""Takes a chunk id and the chunk's context tokens; returns the number of the store's tier that
would deliver the record (0 is the fastest), or None if that is unknown. It reads no record.
"""


@dataclass(frozen=True)
class Loading:
    """How to load stored KV.

    Attributes
    ----------
    num_threads
        Number of records read at the same time while layers are computed; 0 reads each layer
        before it is computed.
    tier_of
        Returns the tier of a record, so that a controller can compute chunks that are quicker to
        compute than to load; None loads all chunks.
    streaming
        Loads the records before anything is computed, in the quality that the time to first token
        allows; `tier_of` and `pricing` are then not used. None loads them whole.
    pricing
        Lets all of a prompt be computed where that is faster; None takes what is stored.
    hot
        What stays on a graphics card for later prompts; the caller closes it. None: nothing.
    """

    num_threads: int = LOAD_THREADS
    tier_of: TierOf | None = None
    streaming: Streaming | None = None
    pricing: Pricing | None = None
    hot: HotRecords | None = None


@dataclass(frozen=True)
class FusePlan:
    """The plan of one prompt; `kvrag.fusion.fuser.execute` carries it out.

    Attributes
    ----------
    layout
        The prompt's tokens and positions, and the chunks found in it.
    choice
        The caller's choice of repair.
    num_layers
        Number of the model's layers.
    spans
        The spans to take from the store, in prompt order.
    decisions
        For each record whether it is loaded or computed; empty if all are loaded.
    misses
        Why found chunks are computed instead: reason to number of spans.
    num_outpriced
        Stored tokens that are computed, because full prefill is expected to be faster.
    """

    layout: Layout
    choice: Choice
    num_layers: int
    spans: tuple[ReusedSpan, ...]
    decisions: Mapping[RecordId, ChunkDecision] = field(default_factory=dict)
    misses: Mapping[str, int] = field(default_factory=dict)
    num_outpriced: int = 0

    # -- spans taken from the store ----------------------------------------------------------

    @cached_property
    def exact(self) -> tuple[ReusedSpan, ...]:
        """Spans at the place where they were encoded: they need no repair."""
        return tuple(span for span in self.spans if self.layout.is_exact(span))

    @cached_property
    def prompt(self) -> PromptRows:
        """The input of a policy: the spans that it may repair."""
        exact = set(self.exact)
        spans = tuple(span for span in self.spans if span not in exact)
        leading = self.fresh < spans[0].prompt_start if spans else self.fresh[:0]
        num_tokens, num_leading = len(self.layout.token_ids), int(leading.sum())
        return PromptRows(num_tokens, self.num_layers, spans, num_leading=num_leading)

    @property
    def inexact(self) -> tuple[ReusedSpan, ...]:
        """Spans that a policy may repair."""
        return self.prompt.spans

    @cached_property
    def fresh(self) -> torch.Tensor:
        """Ascending positions ``[m]`` of the rows neither kept nor taken from the store."""
        held = covered(len(self.layout.token_ids), self.spans)
        held[: self.layout.num_kept] = True
        return (~held).nonzero()[:, 0]

    # -- repair ------------------------------------------------------------------------------

    @cached_property
    def _chosen(self) -> tuple[Repair, Expected]:
        if isinstance(self.choice, Repair):
            return self.choice, Expected()
        tiers = {record: decision.tier for record, decision in self.decisions.items()}
        return self.choice.choose(self.prompt, len(self.fresh), stored_rows(self.spans, tiers))

    @property
    def repair(self) -> Repair:
        """The policy, and the attention to tokens that stay reused."""
        return self._chosen[0]

    @property
    def expected(self) -> Expected:
        """The controller's expectations for the prompt; unknown without a controller."""
        return self._chosen[1]

    @cached_property
    def num_whole_layers(self) -> int:
        """Number of first layers that recompute all reused tokens and so need none of their KV."""
        return num_whole_layers(self.repair.policy, self.prompt)

    @property
    def question_layers(self) -> range:
        """Layers in which to observe the question's attention before the policy chooses."""
        # Without inexact spans there is nothing to choose from.
        return self.repair.policy.question_layers(self.num_layers) if self.inexact else range(0)

    @cached_property
    def question_start(self) -> int:
        """The first position after the last chunk and its links."""
        computed = (span for span in self.layout.spans if self._is_computed(span))
        last = max((span.prompt_end for span in (*computed, *self.inexact)), default=0)
        return max([last, *(link.position + 1 for link in self.layout.links)])

    def _is_computed(self, span: ReusedSpan) -> bool:
        decision = self.decisions.get(span.record_id)
        return decision is not None and decision.is_computed

    # -- other plans -------------------------------------------------------------------------

    def num_planned_rows(self, spans: Sequence[ReusedSpan]) -> int:
        """Return the rows to compute, summed over layers, if only these spans are loaded."""
        plan = replace(self, spans=tuple(spans))
        policy = plan.repair.policy if plan.inexact else NonePolicy()
        return planned_rows(policy, plan.prompt, len(plan.fresh))

    def without(self, lost: Mapping[RecordId, str | None]) -> FusePlan:
        """Return the plan that computes some records; `lost` gives the reason for each miss.

        A reason of None means that computing the record is a choice, not a miss.
        """
        gone = [span for span in self.spans if span.record_id in lost]
        misses = Counter(self.misses)
        misses.update(reason for span in gone if (reason := lost[span.record_id]) is not None)
        spans = tuple(span for span in self.spans if span.record_id not in lost)
        return replace(self, spans=spans, misses=dict(misses))


def plan_fusion(model: KVModel, layout: Layout, choice: Choice, loading: Loading) -> FusePlan:
    """Decide how to fuse a prompt, without opening any record.

    Parameters
    ----------
    model
        The model that the chunks were encoded with.
    layout
        The prompt's tokens and its stored spans.
    choice
        How to repair reused tokens.
    loading
        How to load stored KV.
    """
    layout = usable(model, layout)
    num_layers = model.spec.num_layers
    if num_layers == 1:
        # K/V of the only layer depend on no other token, so the stored ones are exact.
        choice = Repair(NonePolicy())
    spans = tuple(span for span in layout.spans if span.prompt_start >= layout.num_kept)
    plan = FusePlan(layout, choice, num_layers, spans, misses=layout.misses)
    plan = _with_decisions(plan, choice, loading)
    # Link tokens were trained to repair stored chunks.
    pricing = None if loading.streaming or layout.links else loading.pricing
    if pricing is None or not plan.spans:
        return plan
    num_exact = sum(span.length for span in plan.exact)
    if not pricing.takes_full(plan.repair.policy, plan.prompt, len(plan.fresh), num_exact):
        return plan
    return replace(plan, spans=(), num_outpriced=num_exact + plan.prompt.num_reused)


def _with_decisions(plan: FusePlan, choice: Choice, loading: Loading) -> FusePlan:
    """Return the plan that computes the chunks of which a controller says so."""
    spans = plan.spans
    if not isinstance(choice, LoadingController) or not choice.weighs_loading:
        return plan
    if loading.tier_of is None or loading.streaming is not None:
        return plan
    tier_of = loading.tier_of
    records = list(dict.fromkeys(span.record_id for span in spans))
    # In threads: asking a tier may take a round trip.
    found = threads.each(lambda one: tier_of(*one), records, max(loading.num_threads, 1))
    stored = stored_rows(spans, dict(zip(records, found, strict=True)))
    made = choice.decide(plan.prompt, len(plan.fresh), stored)
    decisions = dict(zip(records, made, strict=False))
    computed = {one: None for one, decision in decisions.items() if decision.is_computed}
    return replace(plan.without(computed), decisions=decisions)


def stored_rows(
    spans: Sequence[ReusedSpan], tiers: Mapping[RecordId, int | None]
) -> tuple[StoredRows, ...]:
    """Return the records that spans are taken from, each with its number of rows."""
    num_rows: Counter[RecordId] = Counter()
    for span in spans:
        num_rows[span.record_id] += span.length
    return tuple(StoredRows(*one, rows, tiers.get(one)) for one, rows in num_rows.items())


def covered(num_tokens: int, spans: Sequence[ReusedSpan]) -> torch.Tensor:
    """Return ``[N]`` bool: whether a span covers each row."""
    # Filled as bytes: while threads load, slices of a tensor cost a hundred times as much.
    marks = bytearray(num_tokens)
    for span in spans:
        marks[span.prompt_start : span.prompt_end] = b"\1" * span.length
    return torch.frombuffer(marks, dtype=torch.bool)


def usable(model: KVModel, layout: Layout) -> Layout:
    """Return a layout with the spans that a prompt can take; a second time changes nothing."""
    return _with_sink(_without_misplaced(model, layout))


def _with_sink(layout: Layout) -> Layout:
    """Leave the prompt's first token out of a span that is not exact.

    Attention that finds nothing rests on a prompt's first token, whose keys and values are unlike
    all others (Xiao et al., arXiv 2309.17453 §3.1). Those of a chunk's first token, which was
    encoded after other text, cannot take their place.
    """
    if not layout.spans or layout.num_kept:
        return layout
    first, *others = layout.spans
    if first.prompt_start or layout.is_exact(first):
        return layout
    rest = replace(
        first, prompt_start=1, chunk_start=first.chunk_start + 1, length=first.length - 1
    )
    return replace(layout, spans=(rest, *others))


def _without_misplaced(model: KVModel, layout: Layout) -> Layout:
    """Leave out and count the spans whose KV is valid only at another position."""
    if not model.is_position_bound:
        return layout
    standing = []
    for span in layout.spans:
        encoded_at = span.encoded_at
        if encoded_at is None:
            if not layout.has_prefix:
                continue
            encoded_at = layout.prefix_length + len(span.context_ids)
        if layout.position(span.prompt_start) == encoded_at + span.chunk_start:
            standing.append(span)
    misses = Counter(layout.misses)
    misses[MISS_POSITION] += len(layout.spans) - len(standing)
    return replace(layout, spans=tuple(standing), misses=dict(+misses))
