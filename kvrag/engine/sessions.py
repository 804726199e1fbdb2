"""The KV of ended answers, in bounded room, for prompts that continue them.

`StoredSessions` writes what memory has no room for into the index's store. What is known of a
record is in this process's memory only, and its name is drawn by chance. So no other process,
engine or user finds it, replaces it or takes its place.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import zip_longest

import torch

from kvrag.chunk import ChunkKey
from kvrag.codec.raw import RawCodec
from kvrag.errors import RecordError, StoreError
from kvrag.fusion.controller import Choice
from kvrag.fusion.fuser import FusedPrompt
from kvrag.fusion.layout import Layout, ReusedSpan
from kvrag.fusion.repair import Repair
from kvrag.fusion.slices import Clock, Slices
from kvrag.ingest.index import Index
from kvrag.kvcache import ChunkKV, FusedKV
from kvrag.models.tokens import num_equal

# -- what an answer leaves -----------------------------------------------------------------------
#
# A repair belongs to the prompt for which it was chosen: other text after a chunk would have had
# other tokens of the chunk recomputed. So a later prompt takes repaired rows, and rows computed
# over them, only if it begins with that whole prompt. It takes other rows as far as it begins
# alike. Thus an edited prompt has the answer that it would have without any earlier one.


@dataclass(frozen=True)
class Turn:
    """What one prompt, and its answer, have put into a buffer.

    Attributes
    ----------
    begin
        The prompt's first row that no earlier turn has filled.
    end
        The prompt's number of tokens; the rows of its answer follow.
    settled
        The first row that depends on a repair chosen for this prompt; `end` if there is none.
    spans
        The spans from `begin` to `settled` that were taken from the store.
    hidden
        ``[1, hidden]``: the last layer's output for the prompt's last row. Computed alone, or over
        repaired rows where a policy has looked over stored ones, the row would be another.
    """

    begin: int
    end: int
    settled: int
    spans: tuple[ReusedSpan, ...]
    hidden: torch.Tensor = field(compare=False)

    def num_alike(self, spans: Sequence[ReusedSpan], num_equal: int) -> int:
        """Return how many rows a prompt may take that does not begin with this whole prompt.

        These are settled rows, taken from where the other prompt would take them.

        Parameters
        ----------
        spans
            The spans of the other prompt.
        num_equal
            With how many tokens of this prompt it begins.
        """
        limit = min(num_equal, self.settled)
        mine = (span for span in self.spans if span.prompt_start < limit)
        others = (span for span in spans if self.begin <= span.prompt_start < limit)
        for one, other in zip_longest(mine, others):
            if one != other or one.prompt_end > limit:
                return min(span.prompt_start for span in (one, other) if span is not None)
        return limit


@dataclass(frozen=True)
class Kept:
    """The KV of a prompt and its answer, after the answer.

    Attributes
    ----------
    kv
        The buffer; nobody else uses it.
    token_ids
        The tokens of its rows, from the first on.
    turns
        The prompts that have filled them, each the beginning of the next.
    num_exact
        Number of first rows without a repaired one among them.
    choice
        How the prompts were repaired.
    """

    kv: FusedKV
    token_ids: tuple[int, ...]
    turns: tuple[Turn, ...]
    num_exact: int
    choice: Choice

    @property
    def size_bytes(self) -> int:
        """Bytes of memory that the buffer takes, unused rows included."""
        return self.kv.storage.numel() * self.kv.storage.element_size()

    @property
    def cost(self) -> float:
        """What taking its rows costs, in rows that could be computed meanwhile."""
        return 0.0

    def overlap(self, layout: Layout, choice: Choice) -> Overlap:
        """Return what a prompt may take.

        Parameters
        ----------
        layout
            The prompt, with all its spans.
        choice
            How it is to be repaired. Repairs of another kind are not taken.
        """
        alike = num_equal(self.token_ids, layout.token_ids)
        if choice != self.choice:
            alike = min(alike, self.num_exact)
        whole, begin = self.turns, alike
        for number, turn in enumerate(self.turns):
            if alike < turn.end:
                alike = turn.num_alike(layout.spans, alike)
                whole, begin = self.turns[:number], min(alike, turn.begin)
                break
        # Another prompt's last token has to be computed to give logits.
        is_again = bool(whole) and whole[-1].end == len(layout.token_ids)
        num_rows = min(alike, len(layout.token_ids) - (not is_again))
        return Overlap(self, num_rows, min(begin, num_rows), whole)


@dataclass(frozen=True)
class Overlap:
    """What a prompt may take of an earlier one's KV.

    Attributes
    ----------
    kept
        The earlier one.
    num_rows
        The number of rows, from the first on.
    begin
        How many of them belong to whole earlier turns.
    turns
        These turns.
    """

    kept: Kept
    num_rows: int
    begin: int
    turns: tuple[Turn, ...]

    @property
    def goes_on(self) -> bool:
        """Whether only the rows of the last answer, or a part of them, are left over."""
        return self.turns == self.kept.turns


def keep(
    fused: FusedPrompt, answer_ids: Sequence[int], choice: Choice, earlier: Overlap | None
) -> Kept:
    """Return what an answered prompt leaves.

    Parameters
    ----------
    fused
        The prompt. Its buffer must not be used otherwise any more.
    answer_ids
        The tokens of the answer whose rows have been written.
    choice
        How the prompt was repaired.
    earlier
        Where its first rows came from; None if it took none.
    """
    layout, num_kept = fused.layout, fused.layout.num_kept
    token_ids = (*layout.token_ids, *answer_ids)
    begin, num_exact = 0, len(token_ids)
    turns: tuple[Turn, ...] = ()
    if earlier is not None:
        begin, turns = earlier.begin, earlier.turns
        if earlier.kept.num_exact < num_kept:
            num_exact = earlier.kept.num_exact
    computed = set(fused.fresh.tolist())
    spans = [
        span
        for span in layout.spans
        if span.prompt_start >= begin and span.prompt_start not in computed
    ]
    end = len(layout.token_ids)
    repaired = (span.prompt_start for span in spans if not layout.is_exact(span))
    first = next((place for place in repaired if place >= num_kept), end)
    settled = end if _looks_back(choice) else first
    if first < end:
        num_exact = min(num_exact, first)
    if begin < end:
        assert fused.hidden is not None
        spans = [span for span in spans if span.prompt_start < settled]
        turns = (*turns, Turn(begin, end, settled, tuple(spans), fused.hidden))
    return Kept(fused.kv, token_ids, turns, num_exact, choice)


def _looks_back(choice: Choice) -> bool:
    """Return whether a repair depends on nothing after the repaired span."""
    return isinstance(choice, Repair) and choice.policy.looks_back and not choice.shift


# -- keeping it ----------------------------------------------------------------------------------

FEWEST_ROWS = 4
"""Fewer rows are not taken: computing them costs as little as copying them."""


class Sessions:
    """Keeps the KV of ended answers, and finds what a prompt may take most of.

    Prompts and answers are matched by their tokens. Several threads may use one object: what
    one takes is no other's until it is kept again.

    Parameters
    ----------
    max_bytes
        Room for all of them; 0 keeps nothing. The least recently used ones are dropped first.
    drop
        Takes what is dropped, with its name.
    """

    def __init__(self, max_bytes: int, drop: Callable[[str | None, Kept], None]) -> None:
        self.max_bytes = max_bytes
        self._drop = drop
        self._lock = threading.Lock()
        self._kept: list[tuple[str | None, Kept]] = []  # the most recent one last

    @property
    def size_bytes(self) -> int:
        """Bytes that are kept now."""
        with self._lock:
            return sum(kept.size_bytes for _, kept in self._kept)

    def worth(self, session: str | None, layout: Layout, choice: Choice) -> float:
        """Return how many rows `take` would save at most; parameters as there."""
        with self._lock:
            offers = self._offers(session, layout, choice)
        return max((worth for worth, *_ in offers), default=0.0)

    def take(
        self,
        session: str | None,
        layout: Layout,
        choice: Choice,
        least: float = FEWEST_ROWS,
    ) -> Overlap | None:
        """Return what a prompt may take, or None if there is nothing; the caller then owns it.

        Parameters
        ----------
        session
            Only what was kept under the same name is taken.
        layout
            The prompt.
        choice
            How it is to be repaired.
        least
            How many rows it must save.
        """
        with self._lock:
            offers = self._offers(session, layout, choice)
            # The most recent wins a draw.
            worth, place, overlap = max(offers, default=(0.0, 0, None))
            if overlap is None or worth < least:
                return None
            del self._kept[place]
            return overlap

    def keep(self, session: str | None, kept: Kept) -> None:
        """Keep an answer's KV, under a name or none."""
        with self._lock:
            self._kept.append((session, kept))
        for one in self.shrink(self.max_bytes):
            self._drop(*one)

    def shrink(self, most: int) -> list[tuple[str | None, Kept]]:
        """Take out the least recently used ones until the others have at most `most` bytes."""
        with self._lock:
            size = sum(one.size_bytes for _, one in self._kept)
            out = []
            while self._kept and size > most:
                out.append(self._kept.pop(0))
                size -= out[-1][1].size_bytes
            return out

    def _offers(
        self, session: str | None, layout: Layout, choice: Choice
    ) -> list[tuple[float, int, Overlap]]:
        """Return what can be taken: the rows that it saves, and its place in the list."""
        found = []
        for place, (name, kept) in enumerate(self._kept):
            if name == session:
                overlap = kept.overlap(layout, choice)
                found.append((overlap.num_rows - kept.cost, place, overlap))
        return found


logger = logging.getLogger("kvrag")

_MAX_WAITING = 2
"""Most buffers that wait in memory to be stored; more are dropped."""
_READ_FOR_ONE = 16
"""Rows that can surely be read while one is computed. A record is read whole."""
_PAUSE_SECONDS = 60.0
"""After a store has refused a record, how long no other is offered to it."""


@dataclass(frozen=True)
class StoredKept(Kept):
    """What an answered prompt leaves, in the store: its `kv` is empty.

    Attributes
    ----------
    key
        The name of its record.
    record_bytes
        The record's size.
    """

    key: ChunkKey
    record_bytes: int

    @property
    def size_bytes(self) -> int:
        """Bytes that it takes in the store."""
        return self.record_bytes

    @property
    def cost(self) -> float:
        """What reading it costs, in rows that could be computed meanwhile."""
        return len(self.token_ids) / _READ_FOR_ONE


class StoredSessions:
    """Writes KV that falls out of memory to an index's store, and reads it back.

    A separate thread writes and removes: no answer waits for it.

    Parameters
    ----------
    index
        The index; its store encrypts, limits and spreads these records over tiers as it does all.
    max_bytes
        Room for all records; 0 writes nothing. The least recently used ones are removed first.
    release
        Takes buffers that were written or dropped.
    """

    def __init__(self, index: Index, max_bytes: int, release: Callable[[FusedKV], None]) -> None:
        self.max_bytes = max_bytes
        self._index = index
        self._release = release
        self._sessions = Sessions(max_bytes, self._forget)
        self._thread = ThreadPoolExecutor(1, "kvrag-sessions")
        # The thread holds it while it works, and a garbage collection in it may call `close`.
        self._working = threading.RLock()
        self._keys: set[ChunkKey] = set()
        self._process = os.getpid()
        self._is_closed = False
        self._waiting = threading.BoundedSemaphore(_MAX_WAITING)
        self._removed_bytes = 0
        self._refused_until = 0.0
        self._has_warned = False

    @property
    def size_bytes(self) -> int:
        """Bytes of the records that are there now."""
        return self._sessions.size_bytes

    def write(self, session: str | None, kept: Kept) -> None:
        """Store KV in the background, or drop it if it is too large or too much waits."""
        fits = len(kept.token_ids) * kept.kv.spec.bytes_per_token <= self.max_bytes
        is_refused = time.monotonic() < self._refused_until
        if fits and not is_refused and self._waiting.acquire(blocking=False):
            try:
                self._thread.submit(self._write, session, kept)
                return
            except RuntimeError:  # closed, or too many threads
                self._waiting.release()
        self._release(kept.kv)

    def take(
        self, session: str | None, layout: Layout, choice: Choice, least: float
    ) -> Overlap | None:
        """Return what a prompt may take, for `read`; see `Sessions.take`."""
        return self._sessions.take(session, layout, choice, least)

    def read(
        self, session: str | None, earlier: Overlap, buffer: FusedKV, clock: Clock
    ) -> Slices[int | None]:
        """Read what was taken into the first rows of a buffer.

        The record is removed if the prompt continues it, and otherwise stays.

        Parameters
        ----------
        session, earlier
            What `take` was called with, and what it returned.
        buffer
            Has room for the rows.
        clock
            Gets the time as stage ``load``.

        Returns
        -------
        int or None
            Bytes read; None if the record is lost, damaged or refused. It is forgotten then.
        """
        kept, num_rows = earlier.kept, earlier.num_rows
        assert isinstance(kept, StoredKept)
        store, stays = self._index.store, True
        clock.resume()
        try:
            record = store.open(kept.key)
            if record is None:
                raise StoreError(f"record {kept.key} is gone")
            with contextlib.closing(record):
                encoded = RawCodec().open(kept.key, record, buffer.spec)
                if encoded.num_tokens != len(kept.token_ids):
                    raise RecordError(f"record {kept.key} holds {encoded.num_tokens} tokens")
                for layer in range(buffer.spec.num_layers):
                    rows = encoded.read_layer(layer)
                    for into, part in zip((buffer.keys, buffer.values), rows, strict=True):
                        into[layer][0, :, :num_rows].copy_(part[:, :num_rows])
                    clock.lap("load")
                    yield False
                    clock.resume()
            stays = not earlier.goes_on
            return encoded.bytes_read
        except (RecordError, StoreError) as error:
            clock.lap("load")
            stays = False
            if isinstance(error, RecordError):
                store.note_damage(kept.key)
            return None
        finally:
            end = self._sessions.keep if stays else self._forget
            end(session, kept)

    def flush(self) -> None:
        """Wait until everything is written and removed."""
        with contextlib.suppress(RuntimeError):  # it is closed
            self._thread.submit(lambda: None).result()

    def close(self) -> None:
        """Remove all records, and write no more."""
        if os.getpid() != self._process:
            return  # a fork: they are its parent's
        self._thread.shutdown(wait=False, cancel_futures=True)
        with self._working:
            self._is_closed = True
            self._remove_all(0)

    @contextlib.contextmanager
    def leaving(self) -> Iterator[None]:
        """Remove all records, and write none while the block gives the index another store."""
        with self._working:
            self._remove_all(self.max_bytes)
            yield

    # -- private -----------------------------------------------------------------------------

    def _write(self, session: str | None, kept: Kept) -> None:
        with self._working:
            try:
                if not self._is_closed:
                    self._store(session, kept)
            except Exception as error:  # no answer depends on it, and nobody waits for it
                self._refused_until = time.monotonic() + _PAUSE_SECONDS
                if not self._has_warned:
                    self._has_warned = True
                    logger.warning(
                        "earlier turns cannot be stored, and are computed again once memory has no "
                        "room for them: %s",
                        error,
                    )
            finally:
                self._waiting.release()
                self._release(kept.kv)

    def _store(self, session: str | None, kept: Kept) -> None:
        """Write a record of KV, and remove others to make room."""
        key = ChunkKey(secrets.token_hex(20))
        num_rows = len(kept.token_ids)
        # Unlike a chunk's, its keys are placed: it is read for the same positions.
        keys, values = (
            torch.stack([one[0, :, :num_rows] for one in part]).cpu()
            for part in (kept.kv.keys, kept.kv.values)
        )
        record = RawCodec().encode(key, ChunkKV(keys, values))
        if len(record) > self.max_bytes:
            return
        for _, one in self._sessions.shrink(self.max_bytes - len(record)):
            self._remove(one)
        self._keys.add(key)  # even if this fails, a part may be there
        self._index.store.put(key, record)
        nothing = FusedKV(kept.kv.spec, 0, 0)
        about = kept.token_ids, kept.turns, kept.num_exact, kept.choice
        self._sessions.keep(session, StoredKept(nothing, *about, key, len(record)))

    def _forget(self, session: str | None, kept: Kept) -> None:
        """Remove a record in the background."""
        del session
        with contextlib.suppress(RuntimeError):  # it is closed, which removes all
            self._thread.submit(self._remove, kept)

    def _remove(self, kept: Kept) -> None:
        assert isinstance(kept, StoredKept)
        with self._working, contextlib.suppress(StoreError):  # `close` tries again
            self._index.store.delete(kept.key)
            self._keys.discard(kept.key)
            self._removed_bytes += kept.size_bytes
            if self._removed_bytes > self.max_bytes:
                self._reclaim()

    def _remove_all(self, room: int) -> None:
        """Remove all records; from then on, there is so much room."""
        self._sessions = Sessions(room, self._forget)
        for key in self._keys:
            with contextlib.suppress(StoreError):
                self._index.store.delete(key)
        if self._keys or self._removed_bytes:
            self._reclaim()
        self._keys.clear()

    def _reclaim(self) -> None:
        """Have the store reclaim the room of removed records."""
        self._removed_bytes = 0
        with contextlib.suppress(StoreError):
            self._index.store.collect_garbage()
