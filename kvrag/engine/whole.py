"""`WholeFuser`: the prompts of an engine whose model computes them as wholes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

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

if TYPE_CHECKING:
    from kvrag.models.whole import WholeModel


class _Nothing:
    """What is in a store of answers that writes none."""

    size_bytes = 0


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

    stored = _Nothing()
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
        self._token_seconds = 0.0

    def early(self, _: Request) -> None:
        """Return None: there are no records to bring."""

    def due_seconds(self, _: Request, __: Choice, layout: Layout) -> float:
        """Return how long computing a prompt takes, as far as it is known."""
        return self._token_seconds * len(layout.token_ids)

    def computing_seconds(self, _: Choice, num_stored: int, num_fresh: int) -> float | None:
        """Return what computing a prompt is expected to take, if one was measured."""
        return self._token_seconds * (num_stored + num_fresh) or None

    def fuse(
        self,
        request: Request,
        _: Choice,
        laid_out: LaidOutPrompt,
        layout_seconds: float,
        *,
        keeps: bool,
    ) -> Slices[HeldPrompt]:
        """Compute a prompt, in slices; parameters and errors: see `PromptFuser.fuse`."""
        model, layout = cast("WholeModel", self._index.model), laid_out.layout
        keeps = keeps and request.reuse and self.sessions.max_bytes > 0
        kept, clock = self.sessions if keeps else None, Clock()
        clock.seconds["layout"] = layout_seconds
        prompt = yield from read_whole(model, layout, kept, request.session, clock)
        report = prompt.report
        self._token_seconds = report.seconds["compute"] / report.num_fresh
        self._index.counters.note(report)
        return HeldPrompt(prompt, partial(self._end, request.session, prompt, keeps))

    def _end(
        self, session: str | None, prompt: WholePrompt, keeps: bool, answer: Sequence[int] | None
    ) -> None:
        if keeps and answer is not None:
            self.sessions.keep(session, prompt.state)
