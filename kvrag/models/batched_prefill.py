"""Rows of several prompts in one pass through a model's layers on a graphics card.

A layer's matrices are read, and its products started, once for all rows; each prompt's rows attend
to its own buffer. Prompts offer what they would compute next (`Share`), and pause. Who drives them
computes together what fits (`Meeting`); a prompt whose share nobody has computed computes it by
itself, so a prompt need not know who drives it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from kvrag.models import cardlayers
from kvrag.models.attention import known_rows
from kvrag.models.cardlayers import CardLayers, Prepared, RowsAsked, run_together
from kvrag.models.compiled import HIDDEN
from kvrag.models.rowgraphs import GROUP_LAYERS, MOST_JOINED, CapturedLayers, RowGraphs
from kvrag.models.rows import RowPass
from kvrag.native.gpu.rows import RowOperations, RowPlaces

if TYPE_CHECKING:
    from kvrag.models.kv_model import KVModel

_MOST_KEPT = 16

_here = threading.local()


@dataclass(eq=False)
class Share:
    """What one prompt computes next.

    Attributes
    ----------
    model
        The model.
    layers
        Layers that follow each other.
    hidden
        ``[n, hidden]``: inputs of the rows, which become the outputs.
    of
        The rows, and their prompt.
    compiled
        The prompt's layers.
    last
        The last row.
    asked
        What a look notes; None: nothing.
    graphs
        Of which the prompt would replay one; None: it would not.
    is_done
        Whether the outputs are there.
    error
        Why they are not.
    seconds
        The share of the time that it took to start them.
    """

    model: KVModel
    layers: range
    hidden: torch.Tensor
    of: RowPass
    compiled: CardLayers
    last: int
    asked: RowsAsked | None
    graphs: RowGraphs | None
    is_done: bool = field(default=False, init=False)
    error: Exception | None = field(default=None, init=False)
    seconds: float = field(default=0.0, init=False)

    def joined(self) -> Generator[bool, bool | None, bool]:
        """Pause, a slice long; return whether others have computed the share meanwhile."""
        _here.meeting._offered = self
        yield False
        if self.error is not None:
            raise self.error
        return self.is_done

    def is_like(self, other: Share) -> bool:
        """Return whether another share may be computed together with this one."""
        if self.layers != other.layers or self.graphs is not other.graphs:
            return False
        if self.graphs is None:
            return self.compiled.is_like(other.compiled)
        buckets = {self.graphs.bucket_of(len(one.of.rows)) for one in (self, other)}
        return len(buckets) == 1 and (self.asked is None) == (other.asked is None)

    def state(self) -> torch.Tensor:
        """Return what graphs read of the rows."""
        assert isinstance(self.compiled, CapturedLayers)
        return self.compiled.state_of(self.of.rows, self.of.fused, self.of.tables, self.asked)

    def prepared(self, layer_index: int) -> Prepared:
        """Return what attends for the rows; the first call takes memory."""
        of = self.of
        table = of.tables[layer_index]
        return self.compiled.prepare(of.rows, of.fused, table, self.last, self.asked)


def meets() -> bool:
    """Return whether who drives this thread's prompts computes what they offer."""
    return getattr(_here, "meeting", None) is not None


def share_of(
    model: KVModel,
    layers: range,
    hidden: torch.Tensor,
    of: RowPass,
    asked: RowsAsked | None = None,
    *,
    is_captured: bool = False,
) -> Share | None:
    """Return what a prompt may offer; None where nobody meets, or the rows are too many."""
    last = known_rows(of.rows).last
    if not meets() or not isinstance(of.compiled, CardLayers):
        return None
    if last is None or len(of.rows) > MOST_JOINED:
        return None
    graphs = None
    if is_captured:
        assert isinstance(of.compiled, CapturedLayers)
        graphs = of.compiled.graphs
    return Share(model, layers, hidden, of, of.compiled, last, asked, graphs)


class Meeting:
    """Where a thread that drives several prompts finds what they offer."""

    def __init__(self) -> None:
        self._offered: Share | None = None
        self._most_rows = MOST_JOINED
        # Operations over numbers of rows that came before.
        self._over: dict[tuple[int, int], tuple[object, RowOperations]] = {}

    @contextmanager
    def open(self) -> Iterator[None]:
        """Let prompts that this thread drives in here offer what they compute next."""
        before, _here.meeting = getattr(_here, "meeting", None), self
        try:
            yield
        finally:
            _here.meeting = before

    def taken(self) -> Share | None:
        """Return what the prompt offered that was driven last, if anything."""
        offered, self._offered = self._offered, None
        return offered

    def compute(self, shares: Sequence[Share]) -> list[Share]:
        """Compute some of the shares together; return those whose prompts may go on.

        Those go on that are at the layers of the first one, or at those of one that lacks a few
        layers more: so they meet again, and nobody waits long for others. One alone is not
        computed.

        Parameters
        ----------
        shares
            At least one. The first is the one that is in a hurry.
        """
        stop = shares[0].layers.start
        near = [one for one in shares if stop - GROUP_LAYERS <= one.layers.start <= stop]
        first = min(near, key=lambda one: one.layers.start)
        # More rows would take other slots than those that graphs read.
        room = min(self._most_rows, first.compiled.most_rows) - len(first.of.rows)
        chosen = [first]
        most = len(shares) if first.graphs is None else first.graphs.room_for(len(first.of.rows))
        for one in shares:
            if one is not first and len(one.of.rows) <= room and one.is_like(first):
                chosen.append(one)
                room -= len(one.of.rows)
        chosen = chosen[:most]
        if len(chosen) == 1:
            return chosen
        started = time.perf_counter()
        try:
            with first.model.computing_rows():
                is_done = self._run(chosen) if first.graphs is None else _replay(chosen)
        except Exception as error:
            for one in chosen:
                one.error = error
            return chosen
        if not is_done:
            return [first]
        for one in chosen:
            one.is_done, one.seconds = True, (time.perf_counter() - started) / len(chosen)
        return chosen

    def _run(self, shares: Sequence[Share]) -> bool:
        """Carry layers out operation by operation; return False if there is no memory for it."""
        num_rows = [len(one.of.rows) for one in shares]
        try:
            over = self._prepared(shares, sum(num_rows))
        except torch.OutOfMemoryError:
            self._most_rows //= 2
            return False
        columns = [torch.split(one, num_rows) for one in over.slots.values()]
        parts = [dict(zip(over.slots, some, strict=True)) for some in zip(*columns, strict=True)]

        def each_of(layer_index: int) -> Iterator[Prepared]:
            for one, part in zip(shares, parts, strict=True):
                prepared = one.prepared(layer_index)
                prepared.slots = part
                yield prepared

        torch.cat([one.hidden for one in shares], out=over.slots[HIDDEN])
        run_together(shares[0].layers, over, each_of)
        for one, part in zip(shares, parts, strict=True):
            one.hidden.copy_(part[HIDDEN])
        return True

    def _prepared(self, shares: Sequence[Share], num_rows: int) -> Prepared:
        """Return what carries out operations over all rows, once all memory is there."""
        for one in shares:
            for layer_index in one.layers:
                one.prepared(layer_index)
        compiled = shares[0].compiled
        operations = self._operations(shares[0], num_rows)
        slots = compiled.slots_of(num_rows)
        return Prepared(compiled.description, operations, slots, looks_from=None)

    def _operations(self, share: Share, num_rows: int) -> RowOperations:
        """Return operations over rows that belong nowhere."""
        description = share.compiled.description
        key = id(description), num_rows
        if key not in self._over:
            if len(self._over) >= _MOST_KEPT:
                self._over.clear()
            rows = torch.zeros(num_rows, dtype=torch.long, device=share.hidden.device)
            none = share.hidden.new_empty(0, 0, 0, 0)
            places = RowPlaces(rows, num_rows, [(none, none)], none, none, -1)
            # The description too, or another one may get its id.
            self._over[key] = description, cardlayers.operations_for(places, description)
        return self._over[key][1]


def _replay(shares: Sequence[Share]) -> bool:
    """Replay a graph of all shares; return False if it is not captured yet."""
    graphs = shares[0].graphs
    assert graphs is not None
    return graphs.run(
        shares[0].layers,
        [one.hidden for one in shares],
        [one.of.rows for one in shares],
        [one.state() for one in shares],
        looks=shares[0].asked is not None,
    )
