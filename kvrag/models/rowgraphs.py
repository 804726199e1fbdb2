"""A model's layers over rows of any prompt, captured as CUDA graphs in the background.

A graph computes a group of layers for a bucket of rows. Where the rows belong, and where the
prompt's keys and values are, its kernels read in two tensors on the card, which are written before.
So one graph serves all prompts. A prompt never captures: it notes what it lacks, and is carried
out operation by operation.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise
from typing import Generic, TypeVar

import torch

from kvrag.kvcache import FusedKV
from kvrag.models import cardlayers
from kvrag.models.attention import known_rows
from kvrag.models.batch import KEY_BLOCK, BatchRow, BatchRows
from kvrag.models.cardlayers import CardLayers, Prepared, RowsAsked, Slots, places_of, run_together
from kvrag.models.compiled import HIDDEN, Description, Linear
from kvrag.models.decoders import Model
from kvrag.models.elements import state_of
from kvrag.native.gpu import tiled
from kvrag.native.gpu.rows import RowOperations, RowPlaces
from kvrag.positions.rotary import RotaryTable
from kvrag.process import TurnLock

# -- layers captured -----------------------------------------------------------------------------
#
# A step of an answer, or a layer over rows of a prompt, starts many small kernels, and starting
# them takes Python far longer than the GPU takes to run them. A CUDA graph starts them all at
# once. It reads and writes the memory that it was captured with, which also holds what differs
# between runs.
#
# ``KVRAG_CUDA_GRAPHS=off`` captures nothing. If a capture fails, one warning says so, and this
# process captures nothing more: work is carried out as without graphs.


VARIABLE = "KVRAG_CUDA_GRAPHS"

# A capture stops the GPU for tens of milliseconds, so the batch has to have stayed the same.
_STEPS_BEFORE = 3
# Answers that are written by turns, each alone, keep their graphs. All are dropped together: with
# one of them, PyTorch drops what others on its stream compute in.
_MOST_GRAPHS = 8
_MOST_COUNTS = 64
Step = Callable[[torch.Tensor, BatchRows], torch.Tensor]
"""Takes tokens ``[B]`` and where they belong; returns logits ``[B, vocabulary]``."""

T = TypeVar("T")
_Key = tuple[tuple[int, ...], ...]
_log = logging.getLogger(__name__)

# A process captures one graph at a time.
_capturing = threading.Lock()
# Why a capture failed, of any model. After it, no other capture is sound.
_failures: list[str] = []


def uses_graphs() -> bool:
    """Return whether work on a GPU is captured: unless the environment says no, or one failed."""
    return not _failures and os.environ.get(VARIABLE, "").lower() not in ("0", "off")


def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a stream on which nothing else runs."""
    # Loading threads never get a stream of this priority.
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


class Graph(Generic[T]):
    """What some work starts on a GPU, captured without being carried out.

    Parameters
    ----------
    run
        Starts the work, carried out before: nothing is compiled or prepared in a capture.
    device
        The GPU.
    stream
        A `capture_stream` of it.

    Attributes
    ----------
    made
        What `run` returned; each `replay` fills it.
    """

    def __init__(
        self, run: Callable[[], T], device: torch.device, stream: torch.cuda.Stream
    ) -> None:
        # Not inference tensors, even if the caller is in inference mode: they outlive this call.
        with torch.inference_mode(False), torch.no_grad(), torch.cuda.device(device):
            before = torch.cuda.current_stream(device)
            # Each thread makes its own, which cannot be captured.
            torch.cuda.current_blas_handle()  # type: ignore[no-untyped-call]
            self._graph = torch.cuda.CUDAGraph()
            try:
                # Other threads go on loading meanwhile.
                with torch.cuda.graph(
                    self._graph, stream=stream, capture_error_mode="thread_local"
                ):
                    self.made = run()
            finally:
                torch.cuda.set_stream(before)  # torch leaves its own where a capture fails

    def replay(self) -> None:
        """Start the work, on the current stream."""
        self._graph.replay()


def capture(
    run: Callable[[], T], device: torch.device, stream: torch.cuda.Stream
) -> Graph[T] | None:
    """Return work as a graph (see `Graph`); None, after one warning, if that fails.

    Raises
    ------
    torch.OutOfMemoryError
        If memory is short: less work may still be captured.
    """
    with _capturing, _keeping_garbage():
        if not uses_graphs():
            return None
        short: Exception | None = None
        try:
            return Graph(run, device, stream)
        except RuntimeError as error:
            # The end of the capture may fail after it.
            found = (error, error.__context__)
            short = next((one for one in found if isinstance(one, torch.OutOfMemoryError)), None)
            if short is None:  # some models ask the GPU for a number in the middle of a step
                give_up(error, device)
        with suppress(Exception):
            # PyTorch may believe that this generator still captures, and would refuse to draw.
            drawn = torch.cuda.default_generators[device.index or 0]
            fresh = torch.Generator(device).manual_seed(drawn.initial_seed())
            drawn.graphsafe_set_state(fresh.graphsafe_get_state())
        if short is not None:
            raise short
        return None


@contextmanager
def _keeping_garbage() -> Iterator[None]:
    """Collect no garbage: what ends then may ask the card for what ends a capture."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def say_short(what: str, most: int, device: torch.device) -> None:
    """Warn that a card's memory holds graphs of less work than was wanted."""
    _log.warning(
        "the memory of %s is short: of %s at most %d at once are captured as CUDA graphs, more are "
        "carried out without, which is slower",
        device,
        what,
        most,
    )


def give_up(error: Exception, device: torch.device) -> None:
    """Capture nothing more in this process, and warn that an error is why."""
    told = str(error.__context__ or error).partition("\n")[0]
    _failures.append(told)
    _log.warning(
        "work on %s cannot be captured as a CUDA graph (%s): it is carried out without, "
        "which is slower; %s=off does the same without trying",
        device,
        told,
        VARIABLE,
    )


class CapturedSteps:
    """The captured steps of one model.

    The first steps over some buffers are carried out. Buffers are known by their addresses, and no
    graph keeps them alive. A replay rounds a little otherwise than a step that is carried out, as
    it attends to more keys, which are masked.

    Parameters
    ----------
    hf
        The model.
    windows
        Each layer's sliding window in tokens, None if it sees everything.
    """

    def __init__(self, hf: Model, windows: Sequence[int | None]) -> None:
        self._hf = hf
        self._windows = windows
        self._steps: dict[_Key, CapturedStep] = {}
        self._counts: OrderedDict[_Key, int] = OrderedDict()
        self._has_hooks = False
        # The most answers in a step that memory has room to capture; None: nobody knows.
        self._most: int | None = None
        self._state: tuple[object, ...] = ()
        self._stream: torch.cuda.Stream | None = None

    def check_model(self) -> None:
        """Forget all steps if weights have moved or modules have changed since the last call.

        Call it before each answer, outside the model's use: within, modules are not their own.
        """
        if not uses_graphs() or self._hf.device.type != "cuda":
            return
        state = getattr(self._hf.config, "_attn_implementation", None), *state_of(self._hf)
        if state != self._state:
            self._forget()
            self._counts.clear()
            self._most = None
            self._state = state
        # A replay does not call them.
        self._has_hooks = any(
            module._forward_hooks or module._forward_pre_hooks for module in self._hf.modules()
        )

    def _forget(self) -> None:
        self._steps.clear()
        self._stream = None

    def find(self, rows: Sequence[BatchRow], step: Step) -> CapturedStep | None:
        """Return the step over the buffers of `rows`; None if it has to be carried out itself.

        Parameters
        ----------
        rows
            The rows to compute. No adapter acts on them.
        step
            What is captured.
        """
        if not _is_on_gpu(rows[0].fused) or not uses_graphs():
            return None
        if self._has_hooks or (self._most is not None and len(rows) > self._most):
            return None
        ends = [_end_of(row) for row in rows]
        key = tuple(
            (row.addresses[0][0], row.addresses[1][-1], row.fused.capacity, end)
            for row, end in zip(rows, ends, strict=True)
        )
        found = self._steps.get(key)
        if found is not None:
            return found
        count = self._counts[key] = self._counts.pop(key, 0) + 1
        if len(self._counts) > _MOST_COUNTS:
            self._counts.popitem(last=False)
        if count <= _STEPS_BEFORE:
            return None
        return self._capture(key, rows, ends, step)

    def _capture(
        self, key: _Key, rows: Sequence[BatchRow], ends: Sequence[int], step: Step
    ) -> CapturedStep | None:
        del self._counts[key]
        if len(self._steps) >= _MOST_GRAPHS:
            self._forget()
        device = rows[0].fused.storage.device
        if self._stream is None:
            self._stream = capture_stream(device)
        with torch.inference_mode(False):  # it outlives the caller's
            inputs = torch.zeros(3, len(rows), dtype=torch.long, device=device)
        windows = self._windows

        def run() -> torch.Tensor:
            return step(inputs[0], BatchRows(rows, windows, inputs[1:], ends))

        try:
            graph = capture(run, device, self._stream)
        except torch.OutOfMemoryError:
            graph, self._most = None, len(rows) - 1
            say_short("answers", self._most, device)
        if graph is None:
            self._forget()
            return None
        found = self._steps[key] = CapturedStep(graph, inputs)
        return found


def _is_on_gpu(fused: FusedKV) -> bool:
    return fused.storage.device.type == "cuda"


def _end_of(row: BatchRow) -> int:
    """Return the number of keys that a captured step over a row attends to."""
    return min(-(-(row.place + 1) // KEY_BLOCK) * KEY_BLOCK, row.fused.capacity)


class CapturedStep:
    """A step over certain buffers: its graph, and where the graph reads what differs."""

    def __init__(self, graph: Graph[torch.Tensor], inputs: torch.Tensor) -> None:
        self._graph, self._inputs = graph, inputs

    def run(self, token_ids: Sequence[int], rows: Sequence[BatchRow]) -> torch.Tensor:
        """Return logits ``[B, vocabulary]`` for tokens at the places of `rows`."""
        places = [row.place for row in rows]
        positions = [row.position for row in rows]
        with torch.cuda.device(self._inputs.device):
            self._inputs.copy_(torch.tensor([list(token_ids), places, positions]))
            self._graph.replay()
            return self._graph.made.clone()


# -- layers over rows ----------------------------------------------------------------------------

GROUP_LAYERS = 8
"""The most layers of a graph: as many as are read and placed at once."""
MANY = (2, 4, 8)
"""For how many prompts together layers are captured."""
MOST_JOINED = 512
"""Rows of several prompts that are computed together: with more, products take longer than reading
their matrices."""
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
        # By first layer, bucket, whether attention is noted, and the number of prompts.
        self._graphs: dict[tuple[int, int, bool, int], Graph[None]] = {}
        self._wanted: set[tuple[int, bool, int]] = set()
        # What graphs read, which do not keep it alive: for a prompt, for all rows, their inputs.
        self._each: dict[tuple[int, int], RowOperations] = {}
        self._over: dict[int, RowOperations] = {}
        self._hidden: dict[tuple[int, int], Sequence[torch.Tensor]] = {}
        # A line for a prompt alone, then one for each of several; of no rows until it is written.
        self._states = self._positions = torch.empty(0)
        # Whose are written there: of a prompt alone, of several.
        self._owners: list[Sequence[torch.Tensor]] = [(), ()]
        self._most_joined = min(MOST_JOINED, slots.most_rows)
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
        bucket = self.bucket_of(num_rows)
        if not group or bucket is None or not uses_graphs():
            return range(0)
        if (layer_index, bucket, looks, 1) in self._graphs:
            return group
        self._wanted.add((bucket, looks, 1))
        return range(0)

    def room_for(self, num_rows: int) -> int:
        """Return how many prompts of this many rows a graph computes together at most."""
        bucket = self.bucket_of(num_rows)
        fitting = [one for one in MANY if bucket and one * bucket <= self._most_joined]
        return fitting[-1] if fitting else 1

    def run(
        self,
        layers: range,
        hidden: Sequence[torch.Tensor],
        rows: Sequence[torch.Tensor],
        states: Sequence[torch.Tensor],
        *,
        looks: bool,
    ) -> bool:
        """Replace inputs of layers by outputs, for prompts of one bucket, if that is captured.

        Hold the lock. For one prompt, for which `find` has said so, it is.

        Parameters
        ----------
        hidden
            ``[n, hidden]`` of each prompt. There are at most as many as `room_for` says.
        rows
            ``[n]`` ascending positions.
        states
            `RowPlaces.state` of the rows, on the card: the same tensor for the same rows.
        """
        bucket = self.bucket_of(len(rows[0]))
        many = next(one for one in (1, *MANY) if one >= len(rows))
        if many == 1 and (layers.start, bucket, looks, 1) not in self._graphs:
            # Since `find`, memory has ended, and with it buckets that lack other graphs.
            bucket = min(
                size
                for first, size, *kind in self._graphs
                if (first, kind) == (layers.start, [looks, 1]) and size >= len(rows[0])
            )
        if bucket is None:
            return False
        graph = self._graphs.get((layers.start, bucket, looks, many))
        if graph is None:
            self._wanted.add((bucket, looks, many))
            return False
        self._slots.follow()
        first = int(many > 1)
        if [*map(id, self._owners[first])] != [*map(id, states)]:
            self._owners[first] = states
            for line, (some, state) in enumerate(zip(rows, states, strict=True), first):
                self._positions[line, : len(some)].copy_(some)
                self._states[line, : len(state)].copy_(state)
            if len(rows) < many:
                self._states[first + len(rows) : first + many].zero_()
        given = zip(self._hidden[bucket, many], hidden, strict=False)
        pairs = [(slot[: len(one)], one) for slot, one in given]
        for slot, one in pairs:
            slot.copy_(one)
        graph.replay()
        for slot, one in pairs:
            one.copy_(slot)
        return True

    def bucket_of(self, num_rows: int) -> int | None:
        """Return the bucket of a number of rows; None if there is none."""
        buckets = self._buckets  # which capturing may replace meanwhile
        place = bisect_left(buckets, num_rows)
        if not num_rows or place == len(buckets):
            return None
        bucket = buckets[place]
        return bucket if bucket - num_rows <= self._most_filled else None

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
                    bucket, looks, many = self._wanted.pop()
                for group in self._groups.values():
                    with self._lock, torch.inference_mode(False), torch.no_grad():
                        if not self._capture(group, bucket, looks=looks, many=many):
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
        # More would take other slots, and graphs do not keep theirs alive.
        self._most_joined = min(self._most_joined, most)
        self._buckets = tuple(sorted({*(one for one in BUCKETS if one < most), most}))
        lines, num_numbers = 1 + MANY[-1], 10 + 2 * len(self._description.layers)
        self._states, self._positions = (
            torch.zeros(lines, width, dtype=torch.long, device=self._device)
            for width in (num_numbers, most)
        )
        self._stream = capture_stream(self._device)
        made = self._description
        kind = "rows by CUDA graphs", made.dtype, self._device, made.head_dim, made.num_heads
        if not tiled.is_trusted(*kind, error=self._error):
            self._end()

    def _end(self) -> None:
        """Capture nothing more: what is captured stays in use."""
        self._buckets = tuple(sorted({key[1] for key in self._graphs if key[3] == 1}))
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
        bucket = self.bucket_of(len(found))
        assert bucket is not None
        if not self._capture(self._groups[0][:1], bucket, looks=False):
            raise RuntimeError("a capture failed")
        state = cardlayers.brought(again.state(), self._device)
        self.run(self._groups[0], [found], [again.positions], [state], looks=False)
        del self._graphs[0, bucket, False, 1]
        pairs = ((found, expected), (again.keys[0], places.keys[0]))
        return max(tiled.distance(*pair) for pair in pairs)

    def _capture(self, group: range, bucket: int, *, looks: bool, many: int = 1) -> bool:
        """Capture a group of layers; return whether more may be captured."""
        assert self._stream is not None
        key = group.start, bucket, looks, many
        if bucket not in self._buckets or key in self._graphs:
            return True
        # There are no rows: what is carried out here writes to slots alone.
        self._slots.follow()
        self._owners = [(), ()]
        self._states.zero_()
        try:
            run = self._running(group, bucket, looks, many)
            # Once as it is: kernels are loaded, and memory is taken, outside of the capture.
            current = torch.cuda.current_stream(self._device)
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                run()
            current.wait_stream(self._stream)
            graph = capture(run, self._device, self._stream)
        except torch.OutOfMemoryError:
            if many > 1:
                self._most_joined = bucket * many // 2
                return True
            # Smaller buckets may fit.
            self._buckets = tuple(one for one in self._buckets if one < bucket)
            self._say_short()
            return bool(self._buckets)
        if graph is not None:
            self._graphs[key] = graph
        return graph is not None

    def _running(self, group: range, bucket: int, looks: bool, many: int) -> Callable[[], None]:
        """Return what computes a group of layers over a bucket for each of some prompts."""
        description, num_rows = self._description, bucket * many
        slots = self._slots.of(num_rows)
        each = []
        for number in range(many):
            line = number + (many > 1)
            if (bucket, line) not in self._each:
                positions, state = self._positions[line, :bucket], self._states[line]
                self._each[bucket, line] = cardlayers.kernels_over(positions, state, description)
            part = {name: one[number * bucket :][:bucket] for name, one in slots.items()}
            looks_from = 0 if looks else None
            operations = self._each[bucket, line]
            each.append(
                Prepared(description, operations, part, looks_from=looks_from, has_tables=True)
            )
        over = each[0]
        if many > 1:
            if num_rows not in self._over:
                full = torch.full((2,), num_rows, dtype=torch.long, device=self._device)
                rows = torch.zeros(num_rows, dtype=torch.long, device=self._device)
                self._over[num_rows] = cardlayers.kernels_over(rows, full, description)
            over = Prepared(description, self._over[num_rows], slots, looks_from=None)
        self._hidden[bucket, many] = torch.split(slots[HIDDEN], bucket)
        return partial(run_together, group, over, lambda _: each)


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
        self.graphs = graphs
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
        found = self.graphs.find(layer_index, len(rows), looks=looks)
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
        state = self.state_of(rows, fused, tables, asked)
        self.graphs.run(layers, [hidden], [rows], [state], looks=asked is not None)

    def state_of(
        self,
        rows: torch.Tensor,
        fused: FusedKV,
        tables: Sequence[RotaryTable],
        asked: RowsAsked | None,
    ) -> torch.Tensor:
        """Return `RowPlaces.state` of rows, on the card: the same tensor for the same rows."""
        key = id(rows), id(fused), id(tables), 0 if asked is None else id(asked.mass)
        if key not in self._entered:
            last = known_rows(rows).last
            assert last is not None
            used = [tables[index] for index in self.description.tables]
            places = places_of(rows, fused, used, last, asked)
            self._entered[key] = places, cardlayers.brought(places.state(), rows.device)
        return self._entered[key][1]
