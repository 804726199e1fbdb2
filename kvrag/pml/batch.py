"""Answers several prompts of one schema together, with one copy of its modules in memory."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path as FilePath

import torch

from kvrag.codec.base import EncodedChunk
from kvrag.engine.options import Sampling
from kvrag.engine.sampling import Sampler
from kvrag.engine.text_stream import TextStream, end_ids
from kvrag.errors import ParameterError, PromptTooLongError
from kvrag.fusion.layout import Layout, RecordId, ReusedSpan
from kvrag.fusion.loader import OpenKV, SpanLoader
from kvrag.fusion.slices import LostError, Slices, in_one_slice, whole, without_lost
from kvrag.kvcache import FusedKV
from kvrag.models.families import inside
from kvrag.models.kv_model import KVModel
from kvrag.models.rows import Attending, RowPass
from kvrag.pml.engine import PMLEngine
from kvrag.pml.parser import Prompt

# -- a batch whose prompts share chunks ----------------------------------------------------------
#
# Source: Prompt Cache §4: prompts of one batch point to the same module's memory. Deviation: the
# paper shares pages; here all prompts form one sequence of rows, and a mask says which rows each
# row sees. So the modules are in memory once, and the model's weights are read once for all
# prompts.
#
# A shared row belongs to no single prompt, so it cannot be recomputed for one: there is no
# recompute policy here.

_Place = tuple[str, tuple[int, ...], int]
"""A record by chunk and context, and the position of its first token."""


@dataclass(frozen=True)
class SharedReport:
    """The report on fusing a batch.

    Attributes
    ----------
    num_prompts, num_tokens
        Number of prompts, and of tokens in all of them.
    num_shared_rows, num_fresh_rows
        Rows loaded once for all prompts, and rows computed for single prompts.
    bytes_loaded, buffer_bytes
        Bytes read from the store, and bytes allocated for KV, including room for answers.
    separate_bytes
        Bytes that separate buffers for the prompts would take.
    misses
        Why spans were computed instead: reason to number of spans.
    seconds
        Wall time to the first logits.
    """

    num_prompts: int
    num_tokens: int
    num_shared_rows: int
    num_fresh_rows: int
    bytes_loaded: int
    buffer_bytes: int
    separate_bytes: int
    misses: dict[str, int]
    seconds: float


class SharedPrompts:
    """A batch of prompts, fused.

    Parameters
    ----------
    model
        The model.
    layouts
        The layout of each prompt. Prompts share spans of the same record at the same position.
    open_kv
        Opens a record of any layout.
    room
        Number of tokens that can be decoded for each prompt.

    Attributes
    ----------
    logits
        ``[B, vocabulary]``: each prompt's logits for the first answer token.
    report
        The account of the fusion.
    """

    def __init__(
        self, model: KVModel, layouts: Sequence[Layout], open_kv: OpenKV, room: int
    ) -> None:
        started = time.perf_counter()
        self._model = model
        misses: Counter[str] = Counter()
        loader = SpanLoader(open_kv)

        def attempt(rows: _Rows) -> Slices[_Rows]:
            return in_one_slice(lambda: self._fuse(rows, loader))

        def without(rows: _Rows, error: LostError) -> _Rows:
            gone = [one for one in rows.shared.values() if one.record_id in error.lost]
            misses.update(str(error.lost[one.record_id]) for one in gone)
            return _Rows([_without(layout, error.lost) for layout in rows.of], room)

        try:
            self._rows = whole(without_lost(_Rows(layouts, room), attempt, without))
        finally:
            loader.end()
        rows, per_token = self._rows, model.spec.bytes_per_token
        num_tokens = sum(len(layout.token_ids) for layout in rows.of)
        self.report = SharedReport(
            num_prompts=len(layouts),
            num_tokens=num_tokens,
            num_shared_rows=rows.num_shared,
            num_fresh_rows=rows.num_rows - rows.num_shared,
            bytes_loaded=loader.bytes_loaded,
            buffer_bytes=self._fused.capacity * per_token,
            separate_bytes=(num_tokens + room * len(layouts)) * per_token,
            misses=dict(misses),
            seconds=time.perf_counter() - started,
        )

    def _fuse(self, rows: _Rows, loader: SpanLoader) -> _Rows:
        loader.open(tuple(rows.shared.values()))
        model = self._model
        self._rows = rows
        self._fused = FusedKV(model.spec, rows.num_rows, len(rows.positions), model.device)
        for kv in (*self._fused.keys, *self._fused.values):
            # Answers' rows are interleaved with unused ones, and even masked rows must not be NaN.
            kv[:, :, rows.num_rows :] = 0
        self._tables = model.tables(len(rows.positions), rows.positions)
        loader.begin(self._fused, self._tables)
        fresh = range(rows.num_shared, rows.num_rows)
        self.logits = self._compute(
            rows.owners, fresh, rows.token_ids, rows.last, loader.load_layer
        )
        return rows

    def _compute(
        self,
        owners: Sequence[int],
        new: Sequence[int],
        token_ids: Sequence[int],
        asked: list[int] | slice = slice(None),
        load: Callable[[int], object] = lambda _: None,
    ) -> torch.Tensor:
        """Compute rows of prompts; return the logits of those `asked` for.

        A row sees rows of the same prompt, at or before its position.
        """
        model = self._model
        positions = torch.tensor(self._rows.positions, device=model.device)
        rows, ids = (torch.tensor(list(one), device=model.device) for one in (new, token_ids))
        keys, asking = positions[: max(new) + 1], positions[rows][:, None]
        mine = self._rows.seen[list(owners), : len(keys)].to(model.device) & (keys <= asking)
        near = {window: inside(keys, asking, window) for window in set(model.windows)}
        visible = {window: mine if one is None else mine & one for window, one in near.items()}
        with model.computing_rows():
            hidden = model.embed(ids, positions[rows])
            of = RowPass(rows, self._fused, self._tables)
            for layer_index in range(model.spec.num_layers):
                load(layer_index)
                attending = Attending(visible=visible[model.windows[layer_index]])
                model.rows.forward(layer_index, hidden, of, attending=attending)
            return model.logits(hidden[asked])

    def step(self, token_ids: dict[int, int]) -> dict[int, torch.Tensor]:
        """Write one more token for some prompts; return the logits of the token after each.

        Parameters
        ----------
        token_ids
            Number of the prompt to token id.
        """
        owners = list(token_ids)
        new = [self._rows.append(owner) for owner in owners]
        logits = self._compute(owners, new, list(token_ids.values()))
        return dict(zip(owners, logits, strict=True))


class _Rows:
    """The order of the buffer's rows: shared records, each prompt's own rows, room for answers.

    ``seen`` ``[B, rows]`` says which rows are those of each prompt and its answer.
    """

    def __init__(self, layouts: Sequence[Layout], room: int) -> None:
        self.of = layouts
        lengths: dict[_Place, int] = {}
        for layout in layouts:
            for span in layout.spans:
                place = _place(layout, span)
                lengths[place] = max(lengths.get(place, 0), span.chunk_end)
        self.shared: dict[_Place, ReusedSpan] = {}
        self.positions: list[int] = []
        for (chunk_id, context_ids, position), length in lengths.items():
            span = ReusedSpan(chunk_id, len(self.positions), 0, length, context_ids)
            self.shared[chunk_id, context_ids, position] = span
            self.positions += range(position, position + length)
        self.num_shared = len(self.positions)
        # The rows that are computed follow: whose each is, its token, and each prompt's last.
        self.owners: list[int] = []
        self.token_ids: list[int] = []
        self.last: list[int] = []
        for owner, layout in enumerate(layouts):
            stored = {
                row for one in layout.spans for row in range(one.prompt_start, one.prompt_end)
            }
            fresh = [row for row in range(len(layout.token_ids)) if row not in stored]
            self.owners += [owner] * len(fresh)
            self.token_ids += [layout.token_ids[row] for row in fresh]
            self.positions += [layout.position(row) for row in fresh]
            self.last.append(len(self.owners) - 1)
        self.num_rows = len(self.positions)
        self._next: list[int] = []
        for layout in layouts:
            self._next.append(len(self.positions))
            self.positions += range(layout.end_position, layout.end_position + room)
        self.seen = torch.zeros(len(layouts), len(self.positions), dtype=torch.bool)
        self.seen[self.owners, range(self.num_shared, self.num_rows)] = True
        for owner, layout in enumerate(layouts):
            for span in layout.spans:
                first = self.shared[_place(layout, span)].prompt_start
                self.seen[owner, first + span.chunk_start : first + span.chunk_end] = True

    def append(self, owner: int) -> int:
        """Take the row of a prompt's next token, and return its number."""
        row = self._next[owner]
        self._next[owner] += 1
        self.seen[owner, row] = True
        return row


def _place(layout: Layout, span: ReusedSpan) -> _Place:
    return (span.chunk_id, span.context_ids, layout.position(span.prompt_start) - span.chunk_start)


def _without(layout: Layout, lost: Collection[RecordId]) -> Layout:
    return replace(layout, spans=tuple(one for one in layout.spans if one.record_id not in lost))


# -- answering a batch ---------------------------------------------------------------------------


@dataclass(frozen=True)
class BatchAnswers:
    """The answers of a batch, in the order of its prompts, and its reports."""

    texts: tuple[str, ...]
    report: SharedReport


def generate_batch(
    pml: PMLEngine,
    prompts: Sequence[str | FilePath | Prompt],
    *,
    max_tokens: int = 256,
    temperature: float = 0.0,
    seed: int | None = None,
) -> BatchAnswers:
    """Answer several prompts at once. Modules that they share are in memory once.

    Parameters
    ----------
    pml
        An engine to which the prompts' schema was added.
    prompts
        At least one prompt, all of one schema. Their modules are used as they were encoded: rows
        that several prompts share cannot be recomputed for one of them.
    max_tokens
        The most tokens of each answer.
    temperature, seed
        As in `KVEngine.generate`. Every prompt samples with the same seed.

    Raises
    ------
    PMLError, ParameterError
        As `PMLEngine.place` does; also if the prompts have several schemas.
    PromptTooLongError
        If one of them leaves no position to answer in.
    """
    if isinstance(prompts, str | FilePath):
        raise ParameterError("a batch must be a list of prompts: put the prompt into a list")
    if not prompts or max_tokens < 1:
        raise ParameterError(
            f"a batch of {len(prompts)} prompts, max_tokens {max_tokens}: expected 1 or more each"
        )
    eviction = pml.engine.defaults.eviction_policy
    if eviction is not None:
        raise ParameterError(
            f"eviction {eviction}: rows that several prompts share cannot be forgotten "
            "for one of them; use an engine without eviction, or answer the prompts one by one"
        )
    names = sorted({pml.schema_of(one) for one in prompts})
    if len(names) > 1:
        raise ParameterError(f"prompts of the schemas {', '.join(names)}: a batch has one schema")
    model = pml.engine.index.model
    placed = [pml.place(one) for one in prompts]
    layouts = [one.layout for one in placed]
    end = max(layout.end_position for layout in layouts)
    if end >= model.max_positions:
        raise PromptTooLongError(
            f"a prompt has {end} positions, but {model.name} holds {model.max_positions} with at "
            "least one to answer in; import fewer modules"
        )
    room = min(max_tokens, model.max_positions - end)
    # A record is named by its stretch and by what it was encoded after. A single prompt's opener
    # would choose that prompt's scaffolds instead.
    passages = {
        (span.chunk_id, span.context_ids): one.open_kv
        for one in placed
        for span in one.layout.spans
    }

    def open_kv(chunk_id: str, context_ids: tuple[int, ...]) -> EncodedChunk | None:
        return passages[chunk_id, context_ids](chunk_id, context_ids)

    shared = SharedPrompts(model, layouts, open_kv, room)
    ends = end_ids(model.decoder.generation_config, model.tokenizer)
    sampling = Sampling(temperature=temperature, seed=seed)
    samplers = [Sampler(sampling, shared.logits.device) for _ in layouts]
    streams = [TextStream(model.tokenizer) for _ in layouts]
    nothing = torch.tensor([], dtype=torch.long)  # no penalty asks what was said
    logits = dict(enumerate(shared.logits))
    for num_generated in range(1, room + 1):
        new: dict[int, int] = {}
        for owner, of_owner in logits.items():
            token = samplers[owner].next_token(of_owner, nothing)
            if token in ends:
                continue
            streams[owner].push(token)
            new[owner] = token
        if not new or num_generated == room:
            break
        logits = shared.step(new)
    for stream in streams:
        stream.finish()
    return BatchAnswers(tuple(stream.text for stream in streams), shared.report)
