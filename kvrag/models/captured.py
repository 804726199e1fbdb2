"""Work on a GPU that is captured once and replayed: Python leaves the loop over layers.

A step of an answer, or a layer over rows of a prompt, starts many small kernels, and starting them
takes Python far longer than the GPU takes to run them. A CUDA graph starts them all at once. It
reads and writes the memory that it was captured with, which also holds what differs between runs.

``KVRAG_CUDA_GRAPHS=off`` captures nothing. If a capture fails, one warning says so, and this
process captures nothing more: work is carried out as without graphs.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from kvrag.kvcache import FusedKV
from kvrag.models.batch import KEY_BLOCK, BatchRow, BatchRows
from kvrag.models.decoders import Model
from kvrag.models.elements import state_of

if TYPE_CHECKING:
    pass

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
    with _capturing:
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
