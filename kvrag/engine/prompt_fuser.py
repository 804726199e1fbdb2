"""Fusing a laid-out prompt in a buffer: an empty one, or one that holds an earlier answer's KV."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch

from kvrag.engine.open_answer import HeldPrompt
from kvrag.engine.options import EngineOptions
from kvrag.engine.prices import Prices
from kvrag.engine.prompt_reader import LaidOutPrompt
from kvrag.engine.request import Request
from kvrag.engine.sessions import (
    FEWEST_ROWS,
    Kept,
    Overlap,
    Sessions,
    StoredKept,
    StoredSessions,
    keep,
)
from kvrag.errors import KVRagError, PromptTooLongError
from kvrag.fusion.controller import Choice
from kvrag.fusion.fuser import FusedPrompt, computing_seconds, fuse_in_slices, fused_again
from kvrag.fusion.layout import Layout, ReusedSpan
from kvrag.fusion.linked_rows import ChosenLinks
from kvrag.fusion.loader import OpenKV
from kvrag.fusion.plan import Loading, usable
from kvrag.fusion.policies.base import NonePolicy, PromptRows, RecomputePolicy, planned_rows
from kvrag.fusion.pricing import Pricing, RowPrices
from kvrag.fusion.repair import Repair
from kvrag.fusion.runs import counted
from kvrag.fusion.slices import Clock, Slices
from kvrag.fusion.staging import EarlyRecords, HotTiers
from kvrag.ingest.index import Index
from kvrag.kvcache import FusedKV, KVSpec
from kvrag.loading import threads
from kvrag.loading.pace import Pace
from kvrag.loading.patience import LEAST_SECONDS, UNKNOWN_SECONDS, Patience
from kvrag.loading.streaming import StreamEstimates, Streaming
from kvrag.models.kv_model import KVModel


class BufferPool:
    """Provides fused buffers, and keeps the memory of one between prompts.

    A new buffer of a hundred megabytes costs a page fault for every four kilobytes. On a CPU, that
    can take longer than loading the KV into it.
    """

    def __init__(self) -> None:
        self._spare: tuple[torch.Tensor, torch.cuda.Event | None] | None = None
        self._leaving: list[tuple[torch.Tensor, torch.cuda.Event]] = []
        self._lock = threading.Lock()

    def take(self, spec: KVSpec, num_tokens: int, capacity: int, device: torch.device) -> FusedKV:
        """Return a buffer, in the spare memory if that is large enough."""
        with self._lock:
            spare, self._spare = self._spare, None
            self._leave()
        storage, after = spare or (None, None)
        if after is not None:
            # Not left to one stream: several fill a buffer.
            after.synchronize()
        needed = FusedKV.storage_elements(spec, capacity)
        if storage is not None and (storage.numel() < needed or storage.device != device):
            storage = None
        elif storage is not None and device.type != "cpu":
            # As `FusedKV` does: an earlier prompt may have left NaN.
            storage.zero_()
        return FusedKV(spec, num_tokens, capacity, device, storage)

    def give_back(self, fused: FusedKV, after: torch.cuda.Event | None = None) -> None:
        """Keep the buffer's memory; the caller must not use the buffer afterwards.

        Parameters
        ----------
        after
            The memory is used again only after this event; None: at once.
        """
        given = fused.storage, after
        with self._lock:
            if self._spare is None or self._spare[0].numel() < given[0].numel():
                given, self._spare = self._spare or (given[0], None), given
            storage, after = given
            if after is not None:
                self._leaving.append((storage, after))
            self._leave()

    def _leave(self) -> None:
        """Drop the memory that nothing reads any more; its allocator knows nothing of events."""
        self._leaving = [
            one
            for one in self._leaving
            if not one[1].query()  # type: ignore[no-untyped-call]
        ]


_GROWTH = 1.5
"""A buffer that is kept gets this many times the room that it needs, for the next turns."""
MISS_LOST = "earlier answer lost"


@dataclass(frozen=True)
class _Beginning:
    """A prompt's buffer, what it holds of an earlier answer, and what reading that took."""

    buffer: FusedKV
    earlier: Overlap | None
    num_bytes: int
    seconds: float
    num_lost: int


class PromptFuser:
    """Fuses the prompts of one engine, and keeps what their answers leave.

    Parameters
    ----------
    index
        The index, with its model.
    links
        The link tokens of prompts.
    options
        What the engine was made with.
    """

    def __init__(self, index: Index, links: ChosenLinks, options: EngineOptions) -> None:
        self._index = index
        self._links = links
        self._options = options
        self._estimates = StreamEstimates()
        self._waited = Pace(0.5)  # one slow read does not decide
        self.buffers = BufferPool()
        self._device: torch.device | None = None
        self._hot = HotTiers(options.card_bytes, options.pinned_bytes)
        room = options.session_store_bytes
        self.stored = StoredSessions(index, room, self.buffers.give_back)
        self.sessions = Sessions(options.session_bytes, self.stored.write)
        if room:
            # Whichever ends first, this object or the index, removes what was stored.
            index.closing.callback(weakref.finalize(self, self.stored.close))
            index.upkeep.guests.add(self.stored)

    @cached_property
    def _prices(self) -> Prices | None:
        return Prices(self._index.config.model_fingerprint) if self._options.never_slower else None

    @property
    def stream_counts(self) -> Mapping[str, Any]:
        """See `KVEngine.stream_counts`."""
        return self._estimates.link.counts()

    def due_seconds(self, request: Request, choice: Choice, layout: Layout) -> float:
        """Return how soon an answer should begin: its target, or what computing its rows takes."""
        if request.ttft is not None:
            return request.ttft
        num_tokens, num_layers = len(layout.token_ids), self._index.model.spec.num_layers
        num_leading = layout.spans[0].prompt_start if layout.spans else 0
        prompt = PromptRows(num_tokens, num_layers, layout.spans, num_leading=num_leading)
        num_fresh = num_tokens - prompt.num_reused
        # A controller has not chosen yet.
        policy = choice.policy if isinstance(choice, Repair) else NonePolicy()
        return self._estimates.computing.seconds(planned_rows(policy, prompt, num_fresh)) or 0.0

    def early(self, request: Request) -> EarlyRecords | None:
        """Return what begins to bring a prompt's records to a card; None without one.

        Nothing begins before the layout for a store on another machine, whose patience depends on
        it, nor for a target of time to first token, which chooses what is loaded, nor before a
        prompt has needed the model.
        """
        index = self._index
        if self._device is None or (hot := self._hot.of_prompt(self._device, index.store)) is None:
            return None
        begins = request.ttft is None and threads.is_local(index.store)
        num_threads = self._num_threads() if begins else 0
        pays = partial(self._pays, request)
        return EarlyRecords(index.open_kv, hot, index.model.spec, num_threads, pays)

    def _pays(self, request: Request, num_stored: int, num_fresh: int, num_leading: int) -> bool:
        """Return whether a prompt will probably take what is stored of it."""
        rows = self._row_prices()
        if rows is None or not num_stored:
            return True
        policy, prompt = self._one_span(request.recompute.choice(), num_stored, num_fresh)
        prompt = replace(prompt, num_leading=num_leading)
        return not Pricing(rows, self._waited).seems_full(policy, prompt, num_fresh)

    def computing_seconds(self, choice: Choice, num_stored: int, num_fresh: int) -> float | None:
        """Return what computing a prompt is expected to take, if prices were measured."""
        rows = self._row_prices()
        policy, prompt = self._one_span(choice, num_stored, num_fresh)
        return None if rows is None else rows.of_reuse(policy, prompt, num_fresh)

    def _one_span(
        self, choice: Choice, num_stored: int, num_fresh: int
    ) -> tuple[RecomputePolicy, PromptRows]:
        """Return the policy of a choice, and a prompt with one span of stored tokens, or none."""
        # A controller has not chosen yet.
        policy = choice.policy if isinstance(choice, Repair) else NonePolicy()
        spans = (ReusedSpan("", 0, 0, num_stored),) if num_stored else ()
        num_layers = self._index.model.spec.num_layers
        return policy, PromptRows(num_stored + num_fresh, num_layers, spans)

    def fuse(
        self,
        request: Request,
        choice: Choice,
        laid_out: LaidOutPrompt,
        layout_seconds: float,
        *,
        keeps: bool,
        twin: KVModel | None = None,
    ) -> Slices[HeldPrompt]:
        """Fuse a prompt, in slices.

        Parameters
        ----------
        request
            The request, with an engine's defaults.
        choice
            How to repair reused tokens.
        laid_out
            The prompt.
        layout_seconds
            How long it took to lay it out.
        keeps
            Whether the prompt may take KV of earlier answers, and leaves its own.
        twin
            A twin of the model to compute with; None: the model.

        Returns
        -------
        HeldPrompt
            The fused prompt, and what takes its buffer back.

        Raises
        ------
        PromptTooLongError
            If the prompt leaves no room in the context window.
        """
        self._device = self._index.model.device
        if laid_out.early is None:
            laid_out = replace(laid_out, early=self.early(request))
        try:
            return (yield from self._fuse(request, choice, laid_out, layout_seconds, keeps, twin))
        finally:
            if laid_out.early is not None:
                laid_out.early.close()

    def _fuse(
        self,
        request: Request,
        choice: Choice,
        laid_out: LaidOutPrompt,
        layout_seconds: float,
        keeps: bool,
        twin: KVModel | None,
    ) -> Slices[HeldPrompt]:
        index, layout, open_kv = self._index, laid_out.layout, laid_out.open_kv
        assert request.max_tokens is not None  # the engine's defaults set it
        if open_kv is None:
            # A placed prompt stays as it is: link tokens would move what follows them.
            layout = self._links.insert(layout, request.max_tokens)
        room = self._room(layout, request.max_tokens)
        keeps = keeps and open_kv is None and self._can_keep(request, layout)
        if keeps:
            layout = usable(index.model, layout)  # as the layouts of earlier prompts are
            begun = yield from self._begin(request.session, layout, choice, room)
        else:
            begun = _Beginning(self._new_buffer(layout, room, grows=False), None, 0, 0.0, 0)
        earlier, buffer = begun.earlier, begun.buffer
        if earlier is not None:
            layout = _keeping(layout, laid_out, earlier.num_rows)
        # Link tokens' adapter is the model's.
        model = index.model if twin is None or layout.links else twin
        try:
            if earlier is not None and earlier.num_rows == len(layout.token_ids):
                fused = fused_again(model, layout, choice, buffer, earlier.turns[-1].hidden)
            else:
                fused = yield from fuse_in_slices(
                    model,
                    layout,
                    open_kv or self._opener(request, layout, laid_out.early),
                    choice,
                    buffer,
                    self._links.on_model if layout.links else None,
                    self._loading(request, layout_seconds, laid_out),
                )
        except BaseException:  # a cancelled one as well
            if earlier is not None and earlier.goes_on:
                # The conversation may go on: its rows are as they were.
                ids, kept = layout.token_ids[: earlier.num_rows], earlier.kept
                kept = Kept(buffer, ids, kept.turns, kept.num_exact, kept.choice)
                self.sessions.keep(request.session, kept)
            else:
                self.buffers.give_back(buffer)
            raise
        report = fused.report
        num_rows = sum(report.rows_by_layer) + report.rows_asked
        if num_rows:
            self._estimates.computing.observe(num_rows, computing_seconds(report.seconds))
        if index.model.lacks_graphs:
            threads.start(index.model.capture_rows, threads.READING)
        if self._prices is not None and layout.spans:
            self._prices.measure_later(index.model)
            num_loaded, prices = report.num_cached - report.num_kept, self._row_prices()
            if report.stream is None and num_loaded and prices is not None:
                # In the time of the idle machine that the prices are of.
                busy = max(1.0, computing_seconds(report.seconds) / prices.of_report(report))
                self._waited.observe(num_loaded, report.seconds["load"] / busy)
        seconds = {"layout": layout_seconds, **report.seconds}
        seconds["load"] = seconds.get("load", 0.0) + begun.seconds
        misses = dict(report.misses)
        if begun.num_lost:
            misses[MISS_LOST] = begun.num_lost
        num_bytes = report.bytes_loaded + begun.num_bytes
        report = replace(report, seconds=seconds, misses=misses, bytes_loaded=num_bytes)
        index.counters.note(report)
        fused = replace(fused, report=report)
        if keeps and fused.hidden is not None:
            # Its memory is the next pass's on a card.
            fused = replace(fused, hidden=fused.hidden.clone())
        release = partial(self._end, request.session, fused, choice, earlier, keeps)
        return HeldPrompt(fused, release)

    def _end(
        self,
        session: str | None,
        fused: FusedPrompt,
        choice: Choice,
        earlier: Overlap | None,
        keeps: bool,
        answer_ids: list[int] | None,
    ) -> None:
        if keeps and answer_ids is not None:
            self.sessions.keep(session, keep(fused, answer_ids, choice, earlier))
        else:
            self.buffers.give_back(fused.kv)

    def _can_keep(self, request: Request, layout: Layout) -> bool:
        """Return whether a prompt's rows are those of its tokens, whole and in order."""
        return (
            self.sessions.max_bytes + self.stored.max_bytes > 0
            and request.reuse
            and request.ttft is None
            and not layout.links
        )

    def _room(self, layout: Layout, max_tokens: int) -> int:
        """Return the number of tokens that an answer may have. Raises PromptTooLongError."""
        model = self._index.model
        num_tokens = len(layout.token_ids)
        end = layout.end_position
        if end >= model.max_positions:
            over = f"{num_tokens} tokens" if end == num_tokens else f"{end} positions"
            raise PromptTooLongError(
                f"the prompt has {over}, but {model.name} holds "
                f"{model.max_positions} with at least one to answer in; shorten it, or retrieve "
                "fewer chunks"
            )
        return min(max_tokens, model.max_positions - end)

    def _new_buffer(self, layout: Layout, room: int, *, grows: bool) -> FusedKV:
        model, num_tokens = self._index.model, len(layout.token_ids)
        capacity = num_tokens + room
        if grows:
            most = min(model.max_positions, self.sessions.max_bytes // model.spec.bytes_per_token)
            capacity = max(capacity, min(int(_GROWTH * capacity), most))
        return self.buffers.take(model.spec, num_tokens, capacity, model.device)

    @property
    def _has_free_room(self) -> bool:
        """Whether unused rows take no memory: that of a process does not before it is written."""
        return self._index.model.device.type == "cpu"

    def _begin(
        self, session: str | None, layout: Layout, choice: Choice, room: int
    ) -> Slices[_Beginning]:
        """Return a buffer that begins with what an earlier answer has left, in memory or stored."""
        clock, num_lost = Clock(), 0
        while (earlier := self._take(session, layout, choice)) is not None:
            if not isinstance(earlier.kept, StoredKept):
                buffer = self._buffer_after(earlier, session, layout, room)
                return _Beginning(buffer, earlier, 0, 0.0, num_lost)
            buffer = self._new_buffer(layout, room, grows=earlier.goes_on or self._has_free_room)
            num_bytes = yield from self.stored.read(session, earlier, buffer, clock)
            if num_bytes is not None:
                return _Beginning(buffer, earlier, num_bytes, clock.seconds["load"], num_lost)
            self.buffers.give_back(buffer)
            num_lost += 1
        buffer = self._new_buffer(layout, room, grows=self._has_free_room)
        return _Beginning(buffer, None, 0, clock.seconds.get("load", 0.0), num_lost)

    def _take(self, session: str | None, layout: Layout, choice: Choice) -> Overlap | None:
        """Return what the prompt may take; what is in memory wins a draw."""
        if self.stored.max_bytes:
            least = max(FEWEST_ROWS, self.sessions.worth(session, layout, choice) + 1)
            stored = self.stored.take(session, layout, choice, least)
            if stored is not None:
                return stored
        return self.sessions.take(session, layout, choice)

    def _buffer_after(
        self, earlier: Overlap, session: str | None, layout: Layout, room: int
    ) -> FusedKV:
        """Return a buffer that begins with an earlier one's rows: the same one if it has room."""
        old, num_tokens = earlier.kept.kv, len(layout.token_ids)
        is_here = old.storage.device == self._index.model.device  # the model may have moved
        if earlier.goes_on and is_here and old.capacity >= num_tokens + room:
            return old.with_tokens(num_tokens)
        grows = earlier.goes_on or self._has_free_room
        buffer = self._new_buffer(layout, room, grows=grows)
        buffer.copy_rows(old, earlier.num_rows)
        if earlier.goes_on:
            self.buffers.give_back(old)
        else:
            self.sessions.keep(session, earlier.kept)
        return buffer

    def _opener(self, request: Request, layout: Layout, early: EarlyRecords | None) -> OpenKV:
        """Return what opens the records of a prompt, for as long as it has patience."""
        index, seconds = self._index, self._options.store_patience
        patience = None
        # A target for the first token is a limit already.
        if request.ttft is None and (seconds is not None or not threads.is_local(index.store)):
            if seconds is None:
                self._row_prices()
                num_tokens = sum(span.length for span in layout.spans)
                price = self._estimates.computing.seconds(num_tokens * index.model.spec.num_layers)
                seconds = UNKNOWN_SECONDS if price is None else max(price, LEAST_SECONDS)
            patience = Patience(seconds)
        open_kv: OpenKV = partial(index.open_kv, patience=patience)
        if early is not None and patience is None:
            open_kv = early.open_kv
        return index.on_demand.opener(open_kv, layout)

    def _num_threads(self) -> int:
        index, num_threads = self._index, self._options.load_threads
        if num_threads is None:
            return threads.suitable(index.store, index.model.device)
        return num_threads

    def _loading(self, request: Request, layout_seconds: float, laid_out: LaidOutPrompt) -> Loading:
        index, num_threads = self._index, self._num_threads()
        hot = None if laid_out.early is None else laid_out.early.hot
        streaming = None
        if request.ttft is not None:
            streaming = self._streaming(request.ttft, layout_seconds)
        if laid_out.open_kv is not None:
            # By markup, or for another engine, which may compute faster or slower.
            return Loading(num_threads, None, streaming, hot=hot)
        rows = self._row_prices()
        pricing = None if rows is None else Pricing(rows, self._waited)
        return Loading(num_threads, index.tier_of, streaming, pricing, hot)

    def _row_prices(self) -> RowPrices | None:
        """Return what computing costs, if it was measured: the first estimate for deadlines too."""
        model, computing = self._index.model, self._estimates.computing
        rows = None if self._prices is None else self._prices.known(model)
        if rows is not None and not computing.is_known:
            for num_rows, seconds in zip(rows.num_rows, rows.seconds, strict=True):
                computing.observe(num_rows * model.spec.num_layers, seconds)
        return rows

    def _streaming(self, ttft: float, layout_seconds: float) -> Streaming:
        """Return a prompt's target, with what is known about loading and computing."""
        self._row_prices()
        started = time.perf_counter() - layout_seconds
        try:
            calibration = self._index.calibration
        except KVRagError:
            calibration = None  # estimates then come from earlier prompts
        loading = None if calibration is None else calibration.loading
        prior = None if loading is None else loading.tier(None).seconds_per_token
        return Streaming(ttft, started, self._estimates, prior)


def _keeping(layout: Layout, laid_out: LaidOutPrompt, num_kept: int) -> Layout:
    """Return a layout whose first rows are kept; they are not fresh."""
    fresh = [replace(one, start=max(one.start, num_kept)) for one in laid_out.fresh]
    reasons = counted([one for one in fresh if one.start < one.end])
    return replace(layout, num_kept=num_kept, fresh_reasons=reasons)
