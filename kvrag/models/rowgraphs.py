"""A model's layers over rows of any prompt, captured as CUDA graphs in the background.

A graph computes a group of layers for a bucket of rows. Where the rows belong, and where the
prompt's keys and values are, its kernels read in two tensors on the card, which are written before.
So one graph serves all prompts. A prompt never captures: it notes what it lacks, and is carried
out operation by operation.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

import torch

from kvrag.kvcache import FusedKV
from kvrag.models import cardlayers
from kvrag.models.attention import known_rows
from kvrag.models.captured import (
    Graph,
    capture,
    capture_stream,
    give_up,
    say_short,
    uses_graphs,
)
from kvrag.models.cardlayers import CardLayers, Prepared, RowsAsked, Slots, places_of
from kvrag.models.compiled import HIDDEN, Description, Linear
from kvrag.native.gpu import tiled
from kvrag.native.gpu.rows import RowOperations, RowPlaces
from kvrag.positions.rotary import RotaryTable
from kvrag.process import TurnLock

GROUP_LAYERS = 8
"""The most layers of a graph: as many as are read and placed at once."""
BUCKETS = tuple(size for power in range(5, 12) for size in (1 << power, 3 << power - 1))
"""Numbers of rows that layers are captured for, with the most rows of slots."""
# A graph also computes the rows that fill its bucket up. Where that takes more multiplications than
# a card does while a layer's operations are started one by one, rows are carried out so.
_MOST_FILLED = 4e10


def groups_of(num_layers: int) -> list[range]:
    """Return the layers of each graph.

    A policy chooses rows before the second layer, and of the last one little is computed.
    """
    edges = {0, min(1, num_layers - 1), *range(GROUP_LAYERS, num_layers - 1, GROUP_LAYERS)}
    return [range(*ends) for ends in pairwise(sorted(edges | {num_layers - 1}))]


class RowGraphs:
    """The captured layers of one model on one card.

    Parameters
    ----------
    description
        The layers, whose weights are on the card.
    slots
        Memory that prompts share.
    device
        The card.
    lock
        The model's: held while layers are computed or captured.
    """

    def __init__(
        self, description: Description, slots: Slots, device: torch.device, lock: TurnLock
    ) -> None:
        self._description, self._slots, self._device, self._lock = description, slots, device, lock
        self._groups = {group.start: group for group in groups_of(len(description.layers))}
        linears = (one for one in description.layers[0] if isinstance(one, Linear))
        weights = sum(one.layer.weight.numel() for one in linears)
        self._most_filled = _MOST_FILLED / weights
        self._graphs: dict[tuple[int, int, bool], Graph[None]] = {}
        # The buckets of these, ascending, by first layer; their inputs, by bucket.
        self._captured: defaultdict[tuple[int, bool], list[int]] = defaultdict(list)
        self._hidden: dict[int, torch.Tensor] = {}
        self._operations: dict[int, RowOperations] = {}
        self._wanted: set[tuple[int, bool]] = set()
        # 0 rows until a prompt's state is written there.
        self._state = self._positions = torch.empty(0)
        self._owner: torch.Tensor | None = None
        self._stream: torch.cuda.Stream | None = None
        self._buckets: tuple[int, ...] = (*BUCKETS, slots.most_rows)
        self._has_said = False

    def find(self, layer_index: int, num_rows: int, *, looks: bool) -> range:
        """Return the layers that a graph computes from one on; none: it is not captured yet.

        Parameters
        ----------
        looks
            Whether the layers' attention is noted.
        """
        group = self._groups.get(layer_index, range(0))
        bucket = self._bucket_of(num_rows)
        if not group or bucket is None or not uses_graphs():
            return range(0)
        if (layer_index, bucket, looks) in self._graphs:
            return group
        self._wanted.add((bucket, looks))
        return range(0)

    def _bucket_of(self, num_rows: int) -> int | None:
        buckets = self._buckets  # which capturing may replace meanwhile
        place = bisect_left(buckets, num_rows)
        if not num_rows or place == len(buckets):
            return None
        bucket = buckets[place]
        return bucket if bucket - num_rows <= self._most_filled else None

    def run(
        self,
        layers: range,
        hidden: torch.Tensor,
        rows: torch.Tensor,
        state: torch.Tensor,
        *,
        looks: bool,
    ) -> None:
        """Replace the inputs of the layers of `find` by their outputs. Hold the lock.

        Parameters
        ----------
        hidden
            ``[n, hidden]``.
        rows
            ``[n]`` ascending positions.
        state
            `RowPlaces.state` of the rows, on the card: the same tensor for the same rows.
        """
        # Since `find`, memory may have ended, and with it buckets that lack other graphs.
        buckets = self._captured[layers.start, looks]
        bucket = buckets[bisect_left(buckets, len(rows))]
        if self._owner is not state:
            self._positions[: len(rows)].copy_(rows)
            self._state[: len(state)].copy_(state)
            self._owner = state
        slot = self._hidden[bucket][: len(rows)]
        slot.copy_(hidden)
        self._graphs[layers.start, bucket, looks].replay()
        hidden.copy_(slot)

    @property
    def wants_more(self) -> bool:
        """Whether prompts have lacked graphs."""
        return bool(self._wanted) and uses_graphs()

    def capture(self) -> None:
        """Capture what prompts have lacked. Another thread may compute a prompt meanwhile."""
        try:
            with self._lock, torch.inference_mode(False), torch.no_grad():
                self._begin()
            while True:
                with self._lock:
                    if not self.wants_more:
                        return
                    bucket, looks = self._wanted.pop()
                for group in self._groups.values():
                    with self._lock, torch.inference_mode(False), torch.no_grad():
                        if not self._capture(group, bucket, looks=looks):
                            return
        except torch.OutOfMemoryError:
            self._end()
            self._say_short()
        except Exception as error:  # of a compiler, for example: it would return at each prompt
            give_up(error, self._device)

    def _begin(self) -> None:
        """Take memory, and compare a graph with what it was captured from, the first time."""
        if self._stream is not None or not self._groups:
            return
        most = self._slots.reserve()
        self._buckets = tuple(sorted({*(one for one in BUCKETS if one < most), most}))
        numbers = torch.long
        num_numbers = 10 + 2 * len(self._description.layers)
        self._state = torch.zeros(num_numbers, dtype=numbers, device=self._device)
        self._positions = torch.zeros(most, dtype=numbers, device=self._device)
        self._stream = capture_stream(self._device)
        made = self._description
        kind = "rows by CUDA graphs", made.dtype, self._device, made.head_dim, made.num_heads
        if not tiled.is_trusted(*kind, error=self._error):
            self._end()

    def _end(self) -> None:
        """Capture nothing more: what is captured stays in use."""
        self._buckets = tuple(sorted({bucket for _, bucket, _ in self._graphs}))
        self._wanted.clear()

    def _say_short(self) -> None:
        """Say once that memory is short."""
        if not self._has_said:
            self._has_said = True
            say_short("rows", max(self._buckets, default=0), self._device)

    def _error(self) -> float:
        """Return how far a replay is from what was captured, over rows of some prompt."""
        places, expected = cardlayers.sample(self._description, self._device)
        slots = {name: slot.clone() for name, slot in self._slots.of(len(expected)).items()}
        done = Prepared(
            self._description,
            cardlayers.operations_for(places, self._description),
            slots | {HIDDEN: expected},
            looks_from=None,
            has_tables=True,
        )
        done.run(0, self._description.layers[0])
        again, found = cardlayers.sample(self._description, self._device)
        bucket = self._bucket_of(len(found))
        assert bucket is not None
        if not self._capture(self._groups[0][:1], bucket, looks=False):
            raise RuntimeError("a capture failed")
        state = cardlayers.brought(again.state(), self._device)
        self.run(self._groups[0], found, again.positions, state, looks=False)
        del self._graphs[0, bucket, False], self._captured[0, False]
        pairs = ((found, expected), (again.keys[0], places.keys[0]))
        return max(tiled.distance(*pair) for pair in pairs)

    def _capture(self, group: range, bucket: int, *, looks: bool) -> bool:
        """Capture a group of layers; return whether more may be captured."""
        assert self._stream is not None
        if bucket not in self._buckets or (group.start, bucket, looks) in self._graphs:
            return True
        description = self._description
        # There are no rows: what is carried out here writes to slots alone.
        self._owner = None
        self._state.zero_()
        try:
            operations = self._operations.get(bucket)
            if operations is None:
                operations = cardlayers.kernels_over(
                    self._positions[:bucket], self._state, description
                )
            prepared = Prepared(
                description,
                operations,
                self._slots.of(bucket),
                looks_from=0 if looks else None,
                has_tables=True,
            )

            def run() -> None:
                for layer_index in group:
                    prepared.run(layer_index, description.layers[layer_index])

            # Once as it is: kernels are loaded, and memory is taken, outside of the capture.
            current = torch.cuda.current_stream(self._device)
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                run()
            current.wait_stream(self._stream)
            self._operations[bucket] = operations
            graph = capture(run, self._device, self._stream)
        except torch.OutOfMemoryError:
            # Smaller buckets may fit.
            self._buckets = tuple(one for one in self._buckets if one < bucket)
            self._say_short()
            return bool(self._buckets)
        if graph is None:
            return False
        self._hidden[bucket] = prepared.slots[HIDDEN]
        insort(self._captured[group.start, looks], bucket)
        self._graphs[group.start, bucket, looks] = graph
        return True


class CapturedLayers(CardLayers):
    """A model's layers, for rows of one prompt on a card, of which some are captured.

    Parameters
    ----------
    description, slots
        See `CardLayers`.
    graphs
        What is captured.
    """

    def __init__(self, description: Description, slots: Slots, graphs: RowGraphs) -> None:
        super().__init__(description, slots)
        self._graphs = graphs
        self._entered: dict[tuple[int, ...], tuple[RowPlaces, torch.Tensor]] = {}

    def together(self, layer_index: int, rows: torch.Tensor, observed: range = range(0)) -> range:
        """Return the layers from one on that `run_together` computes; none: nothing is captured.

        Parameters
        ----------
        observed
            The layers whose attention is noted.
        """
        nothing = range(layer_index, layer_index)
        if known_rows(rows).last is None:
            return nothing
        looks = layer_index in observed
        found = self._graphs.find(layer_index, len(rows), looks=looks)
        return found if all((one in observed) == looks for one in found) else nothing

    def run_together(
        self,
        layers: range,
        hidden: torch.Tensor,
        rows: torch.Tensor,
        fused: FusedKV,
        tables: Sequence[RotaryTable],
        asked: RowsAsked | None = None,
    ) -> None:
        """Replace the first layer's inputs by the last one's outputs, for layers of `together`.

        Parameters
        ----------
        hidden, rows, fused, asked
            As in `run_rows`.
        tables
            The table of each layer of the model.
        """
        key = id(rows), id(fused), id(tables), 0 if asked is None else id(asked.mass)
        if key not in self._entered:
            last = known_rows(rows).last
            assert last is not None
            used = [tables[index] for index in self._description.tables]
            places = places_of(rows, fused, used, last, asked)
            self._entered[key] = places, cardlayers.brought(places.state(), rows.device)
        self._graphs.run(layers, hidden, rows, self._entered[key][1], looks=asked is not None)
