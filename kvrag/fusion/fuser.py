"""The fuser: a laid-out prompt and stored chunks in, the prompt's KV and first logits out.

One pass through the layers: the stored rows of a layer are placed, then everything that is not
stored (question, separators, misses) is computed over them together with what the policy wants
again, so that the weights are read once.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvrag.errors import ParameterError
from kvrag.fusion.layout import Layout, ReusedSpan
from kvrag.fusion.links import LinkedRows, Links
from kvrag.fusion.loader import (
    OpenKV,
    RecordId,
    SpanLoader,
    SpanLostError,
    TierOf,
    record_id_of,
)
from kvrag.fusion.policies.auto import planned_rows
from kvrag.fusion.policies.base import PromptRows, RecomputePolicy, StoredRows, mean_count
from kvrag.fusion.policies.none import NonePolicy
from kvrag.fusion.question import QuestionAttention, ask
from kvrag.fusion.report import FusionReport
from kvrag.fusion.selection import Selection
from kvrag.fusion.streamed_loader import PlannedRows, StreamedLoader
from kvrag.kvcache import FusedKV
from kvrag.loading import LOAD_THREADS, threads
from kvrag.loading.cost import ChunkDecision
from kvrag.loading.stream_report import StreamReport
from kvrag.loading.streaming import Streaming
from kvrag.models.adapter import resting
from kvrag.models.attention import Alone
from kvrag.models.caches import FusedCache
from kvrag.models.kv_model import KVModel
from kvrag.models.scaling import ScaledKeys, scaled_answers
from kvrag.positions.rotary import RotaryTable


@dataclass(frozen=True)
class FusedPrompt:
    """A prompt ready for generation.

    Attributes
    ----------
    kv
        KV of all N prompt tokens, link tokens included, with room for what follows.
    logits
        ``[vocabulary]`` in the model's dtype: the distribution of the first answer token.
    report
        What was done.
    fresh
        ``[m]``: ascending positions of the rows computed that were never in the store.
    picks
        For each layer ``[n]``: ascending positions of the reused tokens computed again in it.
    layout
        What was fused: the rows of `kv`.
    scaled
        For each layer the keys that are attended to otherwise; empty where none is.
    links
        Those of the layout, on the model; None where it has none.
    """

    kv: FusedKV
    logits: torch.Tensor
    report: FusionReport
    fresh: torch.Tensor
    picks: tuple[torch.Tensor, ...]
    layout: Layout
    scaled: tuple[ScaledKeys, ...] = ()
    links: Links | None = None

    @contextmanager
    def answering(self, model: KVModel) -> Iterator[None]:
        """Let the model's own forwards go on with the attention and adapter of the prompt."""
        adapting = resting(model.hf) if self.links is None else self.links.answering(model)
        with model.lock, scaled_answers(model.hf, self.kv, self.scaled), adapting:
            yield

    def to_generate(self) -> dict[str, Any]:
        """Return the arguments with which Transformers' ``generate`` goes on from this prompt.

        The prompt's last token is left to it, so that it computes the first logits itself. It
        reckons positions by the number of ids, and the buffer has more rows than the prompt has
        tokens where there are link tokens, fewer where chunks are compressed: ids are added at the
        beginning, those of the first token, or left out there.

        Raises
        ------
        ParameterError
            Where the prompt leaves positions out (markup): ``generate`` cannot be told.
        """
        if self.layout.positions is not None:
            raise ParameterError(
                "this prompt leaves positions out, which Transformers' generate reckons without: "
                "answer it with KVEngine"
            )
        num_rows = self.kv.num_tokens
        token_ids = self.layout.plain_token_ids[-num_rows:]
        added = token_ids[:1] * (num_rows - len(token_ids))
        input_ids = torch.tensor([[*added, *token_ids]], device=self.logits.device)
        return {
            "input_ids": input_ids,
            # Otherwise taken from the ids, of which a prompt may begin with one that pads.
            "attention_mask": torch.ones_like(input_ids),
            "past_key_values": FusedCache(self.kv, num_rows - 1),
        }


MISS_POSITION = "encoded at another position"


class CompressedLostError(Exception):
    """KV of compressed chunks cannot be had: the prompt has to be laid out without them.

    Attributes
    ----------
    lost
        Chunk id to the reason of the miss.
    """

    def __init__(self, lost: Mapping[str, str]) -> None:
        super().__init__(", ".join(f"chunk {chunk_id}: {lost[chunk_id]}" for chunk_id in lost))
        self.lost = lost


def fuse(
    model: KVModel,
    layout: Layout,
    open_kv: OpenKV,
    policy: RecomputePolicy,
    fused: FusedKV,
    links: Links | None = None,
    load_threads: int = LOAD_THREADS,
    tier_of: TierOf | None = None,
    streaming: Streaming | None = None,
) -> FusedPrompt:
    """Fill a buffer with the KV of a whole prompt, computing only what is not stored.

    Parameters
    ----------
    model
        The model that the chunks were encoded with.
    layout
        The prompt's tokens and the spans of it that are stored.
    open_kv
        Opens a chunk's record; what it cannot deliver is prefilled and counted.
    policy
        Which reused tokens are computed again (CacheBlend §4, and others).
    fused
        The buffer, on the model's device, made for the layout's number of tokens.
    links
        `Links.on` the model, where the layout holds link tokens (KVLink §3.3).
    load_threads
        Records read at the same time while layers are computed; 0 reads each layer before it is
        computed.
    tier_of
        Tells where a record is, without reading it, so that a policy may have chunks computed that
        are quicker to compute than to load; None loads all.
    streaming
        Stream the records towards a time to first token, as finely as there is time for, before
        anything is computed; `tier_of` is then of no use. None loads them whole.

    Raises
    ------
    CompressedLostError
        When stored rows that stand for a compressed chunk cannot be had: of them alone it is not
        known what to compute instead. All other chunks that are lost are computed.
    """
    if model.spec.num_layers == 1:
        # The only layer's K/V depend on no other token: stored ones are exact as they are.
        policy = NonePolicy()
    clock = _Clock()
    tables = model.tables(len(layout.token_ids), layout.positions)
    layout = _without_misplaced(model, layout)
    linked = LinkedRows(model, layout, links)
    decisions = _decide(model, layout, policy, tier_of if streaming is None else None, load_threads)
    clock.lap("select")
    computed = {record for record, decision in decisions.items() if decision.is_computed}
    wanted = [span for span in layout.spans if record_id_of(span) not in computed]
    stream: StreamReport | None = None
    if streaming is None:
        loader = SpanLoader(wanted, open_kv, linked.write_kv, load_threads)
    else:
        loader = streamed = StreamedLoader(
            wanted, open_kv, linked.write_kv, load_threads, streaming
        )
        stream = streamed.stream(fused, tables, _planned_rows_with(model, layout, policy))
    clock.lap("load")
    try:
        while True:
            _require_compressed(layout, loader)
            try:
                made = _fuse(model, layout, linked, loader, policy, fused, tables, clock, decisions)
                break
            except SpanLostError:
                # Rows computed so far have seen that chunk: begin again without it. Each round has
                # a chunk less, so this ends.
                clock.lap("lost")
    finally:
        # Nothing may be written behind the back of whom the buffer goes to next.
        loader.end()
    if streaming is not None and stream is not None:
        stream = streaming.closing(stream, computing_seconds(clock.seconds))
    report = replace(
        made.report,
        hidden_load_seconds=loader.hidden_seconds,
        stream=stream,
        decisions=tuple(_with_outcomes(decisions, loader, made.report)),
    )
    return replace(made, report=report)


def computing_seconds(seconds: Mapping[str, float]) -> float:
    """Return what of a report's seconds computing took."""
    return sum(seconds.get(stage, 0.0) for stage in ("ask", "select", "compute"))


def _planned_rows_with(model: KVModel, layout: Layout, policy: RecomputePolicy) -> PlannedRows:
    """Return what tells how many rows a prompt will cost when only some spans are loaded."""

    def planned(loaded: Sequence[ReusedSpan]) -> int:
        prompt = _prompt_rows(model, layout, loaded, {})
        num_fresh = len(layout.token_ids) - sum(span.length for span in loaded)
        chosen = policy.resolve(prompt, num_fresh).policy if prompt.spans else NonePolicy()
        return planned_rows(chosen, prompt, num_fresh)

    return planned


def _decide(
    model: KVModel,
    layout: Layout,
    policy: RecomputePolicy,
    tier_of: TierOf | None,
    load_threads: int,
) -> dict[RecordId, ChunkDecision]:
    """Return of each record whether it is loaded or computed; nothing where all are loaded."""
    spans = layout.spans
    # Rows that stand for a compressed chunk are no tokens that could be computed.
    if tier_of is None or not policy.weighs_loading or any(span.num_compressed for span in spans):
        return {}
    where = tier_of

    def find(record: RecordId) -> int | None:
        return where(*record)

    records = list(dict.fromkeys(map(record_id_of, spans)))
    # A tier may be far away.
    found = threads.each(find, records, max(load_threads, 1))
    prompt = _prompt_rows(model, layout, spans, dict(zip(records, found, strict=True)))
    num_fresh = len(layout.token_ids) - sum(span.length for span in spans)
    return dict(zip(records, policy.decide(prompt, num_fresh), strict=False))


def _prompt_rows(
    model: KVModel,
    layout: Layout,
    spans: Sequence[ReusedSpan],
    tiers: Mapping[RecordId, int | None],
) -> PromptRows:
    """Return what a policy may know of a prompt of which these spans are loaded."""
    num_rows: dict[RecordId, int] = {}
    for span in spans:
        record = record_id_of(span)
        num_rows[record] = num_rows.get(record, 0) + span.length
    return PromptRows(
        len(layout.token_ids),
        model.spec.num_layers,
        # Compressed chunks have no tokens that a policy could compute again.
        tuple(span for span in spans if not (span.num_compressed or layout.is_exact(span))),
        records=tuple(StoredRows(*one, rows, tiers.get(one)) for one, rows in num_rows.items()),
    )


def _with_outcomes(
    decisions: Mapping[RecordId, ChunkDecision], loader: SpanLoader, report: FusionReport
) -> Iterator[ChunkDecision]:
    num_rows = sum(report.rows_by_layer)
    seconds_per_row = report.seconds["compute"] / num_rows if num_rows else 0.0
    for record, decision in decisions.items():
        seconds: float | None
        if decision.is_computed:
            seconds = seconds_per_row * len(report.rows_by_layer) * decision.num_tokens
        else:
            seconds = None if record[0] in loader.lost else loader.record_seconds[record]
        yield replace(decision, seconds=seconds)


def _fuse(
    model: KVModel,
    layout: Layout,
    linked: LinkedRows,
    loader: SpanLoader,
    policy: RecomputePolicy,
    fused: FusedKV,
    tables: Sequence[RotaryTable],
    clock: _Clock,
    decisions: Mapping[RecordId, ChunkDecision],
) -> FusedPrompt:
    num_tokens = len(layout.token_ids)
    exact = [span for span in loader.spans if layout.is_exact(span)]
    compressed = [span for span in loader.spans if span.num_compressed]
    tiers = {record: decision.tier for record, decision in decisions.items()}
    prompt = _prompt_rows(model, layout, loader.spans, tiers)
    inexact = prompt.spans
    fresh = linked.without_stored(_complement(num_tokens, loader.spans).to(model.device))
    resolved = policy.resolve(prompt, len(fresh))
    policy = resolved.policy
    num_whole = policy.num_whole_layers(prompt)
    # Before the model is free: another prompt may be at it.
    loader.begin(fused, tables, dict.fromkeys(inexact, num_whole))
    scaling = policy.scaling() if inexact or compressed else None
    scaled: list[ScaledKeys] = []
    held = _covered(num_tokens, [*inexact, *compressed]).to(model.device)
    num_loaded = 0
    rows_by_layer = []
    with model.computing_rows(linked.adapter, fresh):
        asked = policy.question_layers(model.spec.num_layers) if inexact else range(0)
        if asked:
            reused = prompt.reused().to(model.device)
            last = max(inexact[-1].prompt_end, _end_of_computed(layout, decisions))
            attention = QuestionAttention(reused, _question_start(layout, last), asked)
            ask(model, linked.embed, fresh, attention, asked, loader, fused, tables, clock.lap)
            prompt = replace(prompt, relevance=attention.relevance)
            num_loaded = asked.stop
        # Without anything inexact there is nothing to choose from, and no look at it was taken.
        chooser = policy if inexact else NonePolicy()
        encoded = None
        if chooser.compares_attention and not model.family.attends_itself:
            encoded = _encoded(layout, inexact, model.device)
        selection = Selection(chooser, prompt, fresh, encoded)
        hidden = linked.embed(selection.rows)
        clock.lap("select")
        last_layer = model.spec.num_layers - 1
        for layer_index, table in enumerate(tables):
            if layer_index >= num_loaded:
                loader.load_layer(layer_index, fused, table)
                clock.lap("load")
            hidden = selection.enter(layer_index, model, hidden, fused, table)
            clock.lap("select")
            rows = selection.rows
            if scaling is not None:
                # What is computed again is right, and attended to as such.
                scaled.append(ScaledKeys(scaling, held.index_fill(0, rows, False)))
            rows_by_layer.append(len(rows))
            if layer_index == last_layer:
                # Only the last token's output is needed; of the others only their K/V.
                _write_projections(model, layer_index, hidden, rows, fused, table)
                hidden, rows = hidden[-1:].contiguous(), rows[-1:]
                noted = None
            else:
                noted = selection.noting(layer_index)
            model.forward_rows(
                layer_index,
                hidden,
                rows,
                fused,
                table,
                deviation=noted,
                scaled=scaled[-1] if scaled else None,
            )
            clock.lap("compute")
        logits = model.logits(hidden)[0]
    clock.lap("compute")

    num_plain = len(layout.plain_token_ids)
    num_exact = sum(span.length for span in exact)
    num_compressed = sum(span.num_compressed for span in compressed)
    num_recomputed = mean_count([len(picks) for picks in selection.picks])
    report = FusionReport(
        policy=str(policy),
        num_tokens=num_plain,
        num_exact=num_exact,
        num_reused=prompt.num_reused - num_recomputed + num_compressed,
        num_recomputed=num_recomputed,
        num_fresh=num_plain - num_exact - prompt.num_reused - num_compressed,
        num_in_context=sum(
            span.num_compressed or span.length for span in loader.spans if span.context_ids
        ),
        num_chunks=len({span.chunk_id for span in loader.spans}),
        bytes_loaded=loader.bytes_loaded,
        seconds=clock.seconds,
        rows_by_layer=tuple(rows_by_layer),
        rows_asked=len(fresh) * asked.stop,
        num_links=len(layout.links),
        num_unlinked=layout.num_unlinked,
        misses=dict(Counter(layout.misses) + loader.misses),
        expected_loss=resolved.loss,
        expected_seconds=resolved.seconds,
        expected_load_seconds=resolved.load_seconds,
        num_compressed=num_compressed,
        num_compressed_rows=sum(span.length for span in compressed),
        num_neutralised=layout.num_neutralised,
        num_control=layout.num_control,
    )
    return FusedPrompt(
        fused,
        logits,
        report,
        fresh,
        tuple(selection.picks),
        layout,
        tuple(scaled),
        linked.links,
    )


def _without_misplaced(model: KVModel, layout: Layout) -> Layout:
    """Leave out, counted, the spans of KV that holds for another position than it stands at."""
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


def _require_compressed(layout: Layout, loader: SpanLoader) -> None:
    ids = {span.chunk_id for span in layout.spans if span.num_compressed}
    lost = {chunk_id: loader.lost[chunk_id] for chunk_id in ids & loader.lost.keys()}
    if lost:
        raise CompressedLostError(lost)


def _question_start(layout: Layout, last_end: int) -> int:
    """Return the first position behind the last chunk, which ends there, and its links."""
    return max([last_end, *(link.position + 1 for link in layout.links)])


def _end_of_computed(layout: Layout, decisions: Mapping[RecordId, ChunkDecision]) -> int:
    """Return where the last chunk ends that is computed by decision; 0 where none is."""
    return max(
        (
            span.prompt_end
            for span in layout.spans
            if (decision := decisions.get(record_id_of(span))) and decision.is_computed
        ),
        default=0,
    )


class _Clock:
    """Wall seconds by stage; a stage may be entered more than once."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        now = time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._last
        self._last = now


def _encoded(layout: Layout, spans: Sequence[ReusedSpan], device: torch.device) -> Alone:
    """Return of all rows what those of `spans` were encoded with, as far as it stands here too."""
    starts = torch.arange(len(layout.token_ids))
    for span in spans:
        starts[span.prompt_start : span.prompt_end] = layout.encoded_from(span)
    return Alone(starts.to(device), layout.prefix_length)


def _complement(num_tokens: int, spans: list[ReusedSpan]) -> torch.Tensor:
    """Return the ascending positions that no span covers."""
    return (~_covered(num_tokens, spans)).nonzero()[:, 0]


def _covered(num_tokens: int, spans: Sequence[ReusedSpan]) -> torch.Tensor:
    """Return ``[N]`` bool: whether a span covers a position."""
    # Filled as bytes: a tensor's slices cost a hundred times as much, beside threads that load.
    covered = bytearray(num_tokens)
    for span in spans:
        covered[span.prompt_start : span.prompt_end] = b"\1" * span.length
    return torch.frombuffer(covered, dtype=torch.bool)


def _write_projections(
    model: KVModel,
    layer_index: int,
    hidden: torch.Tensor,
    rows: torch.Tensor,
    fused: FusedKV,
    table: RotaryTable,
) -> None:
    which = torch.arange(len(rows), device=rows.device)
    for block, keys, values in model.project_rows(layer_index, hidden, rows, table, which):
        fused.keys[layer_index][0].index_copy_(1, rows[block], keys)
        fused.values[layer_index][0].index_copy_(1, rows[block], values)
