"""`WholeFuser`: the prompts of an engine whose model computes them as wholes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

from kvrag.engine.open_answer import HeldPrompt
from kvrag.engine.options import EngineOptions
from kvrag.engine.prompt_fuser import BufferPool
from kvrag.engine.prompt_reader import LaidOutPrompt
from kvrag.engine.request import Request
from kvrag.errors import ParameterError
from kvrag.fusion.controller import Choice
from kvrag.fusion.layout import Layout
from kvrag.fusion.slices import Clock, Slices
from kvrag.fusion.whole import Beginnings, WholePrompt, read_whole
from kvrag.ingest.index import Index
from kvrag.loading.pace import fit_prices
from kvrag.models.kv_model import KVModel, WholeModel


class WholeFuser:
    """Does for such a model what `kvrag.engine.prompt_fuser.PromptFuser` does for others.

    Parameters
    ----------
    index
        The index, with its model.
    options
        What the engine was made with.

    Raises
    ------
    ParameterError
        For options that concern the KV of chunks, or write KV of answers to the store.
    """

    stored = SimpleNamespace(size_bytes=0)  # it writes no answers to the store
    stream_counts: Mapping[str, Any] = {}

    def __init__(self, index: Index, options: EngineOptions) -> None:
        if options.links not in (None, "off") or options.session_store_bytes:
            raise ParameterError(
                "links and session_store_bytes: this index's model computes prompts as wholes, "
                "takes no KV of chunks, and keeps the beginnings of prompts in memory alone; leave "
                "both out"
            )
        self._index = index
        self.buffers = BufferPool()
        self.sessions = Beginnings(options.session_bytes)
        # The latest by binary digits: hundreds of repeated prompts do not push out a long one.
        self._took: dict[int, tuple[int, float]] = {}

    def early(self, _: Request) -> None:
        """Return None: there are no records to bring."""

    def due_seconds(self, request: Request, _: Choice, layout: Layout) -> float:
        """Return how long computing a prompt takes, as far as it is known."""
        ids = layout.token_ids
        kept = self.sessions.num_kept(request.session, ids) if request.reuse else 0
        return self._seconds(len(ids) - kept) or 0.0

    def _seconds(self, num_fresh: int) -> float | None:
        """Return how long computing tokens takes, by what earlier numbers of them took."""
        seen = list(self._took.values())
        if not seen:
            return None
        fixed, each = fit_prices([(1.0, number) for number, _ in seen], [took for _, took in seen])
        return fixed + each * num_fresh

    def computing_seconds(self, _: Choice, num_stored: int, num_fresh: int) -> float | None:
        """Return what computing a prompt is expected to take, if one was measured."""
        return self._seconds(num_stored + num_fresh)

    def fuse(
        self,
        request: Request,
        _: Choice,
        laid_out: LaidOutPrompt,
        layout_seconds: float,
        *,
        keeps: bool,
        twin: KVModel | None = None,  # noqa: ARG002  # such models have none
    ) -> Slices[HeldPrompt]:
        """Compute a prompt, in slices; parameters and errors: see `PromptFuser.fuse`."""
        model, layout = cast("WholeModel", self._index.model), laid_out.layout
        keeps = keeps and request.reuse and self.sessions.max_bytes > 0
        kept, clock = self.sessions if keeps else None, Clock()
        clock.seconds["layout"] = layout_seconds
        before = laid_out.num_before
        prompt = yield from read_whole(model, layout, kept, request.session, clock, before)
        report = prompt.report
        seen = report.num_fresh, report.seconds["compute"]
        self._took[report.num_fresh.bit_length()] = seen
        self._index.counters.note(report)
        return HeldPrompt(prompt, partial(self._end, request.session, prompt, keeps))

    def _end(
        self, session: str | None, prompt: WholePrompt, keeps: bool, answer: Sequence[int] | None
    ) -> None:
        if keeps and answer is not None:
            self.sessions.keep(session, prompt.state, prompt.before)
