"""Steps of a batch on a GPU, captured once and replayed: Python leaves the loop over layers.

A step starts hundreds of small kernels, and starting them takes Python far longer than the GPU
takes to run them. A CUDA graph starts them all at once. It reads tokens, places and positions from
its own memory. It writes to the buffers of the step that it was captured from.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch

from kvrag.kvcache import FusedKV
from kvrag.models.batch import BatchRow, BatchRows

_log = logging.getLogger(__name__)
# Answers that are written by turns, each alone, keep their graphs: some megabytes each.
_MOST_GRAPHS = 8

Step = Callable[[torch.Tensor, BatchRows], torch.Tensor]
"""Takes tokens ``[B]`` and where they belong; returns logits ``[B, vocabulary]``."""


class CapturedSteps:
    """The captured steps of one model.

    The first step over some buffers is not captured, and is what warms up the libraries: an answer
    of one token pays nothing. Buffers are known by their addresses, and no graph keeps them alive.

    Parameters
    ----------
    windows
        Each layer's sliding window in tokens, None if it sees everything.
    """

    def __init__(self, windows: Sequence[int | None]) -> None:
        self._windows = windows
        self._steps: OrderedDict[tuple[tuple[int, ...], ...], CapturedStep | None] = OrderedDict()
        self._can_capture = True

    def find(self, rows: Sequence[BatchRow], step: Step) -> CapturedStep | None:
        """Return the step over the buffers of `rows`; None if it has to be carried out itself.

        Parameters
        ----------
        rows
            The rows to compute. No adapter acts on them.
        step
            What is captured.
        """
        if not self._can_capture or not _is_on_gpu(rows[0].fused):
            return None
        if any(row.scaled for row in rows):
            return None
        key = tuple((row.addresses[0][0], row.addresses[1][-1], row.fused.capacity) for row in rows)
        if key not in self._steps:
            self._steps[key] = None
            if len(self._steps) > _MOST_GRAPHS:
                self._steps.popitem(last=False)
            return None
        self._steps.move_to_end(key)
        found = self._steps[key]
        if found is None:
            try:
                found = self._steps[key] = CapturedStep(step, rows, self._windows)
            except RuntimeError as error:
                # Some models ask the GPU for a number in the middle of a step.
                self._can_capture = False
                _log.info("steps are not captured: %s", str(error).partition("\n")[0])
        return found


def _is_on_gpu(fused: FusedKV) -> bool:
    return fused.storage.device.type == "cuda"


class CapturedStep:
    """A step over certain buffers.

    Parameters
    ----------
    step
        The step, carried out once before.
    rows
        Rows of the buffers.
    windows
        Each layer's sliding window in tokens, None if it sees everything.
    """

    def __init__(self, step: Step, rows: Sequence[BatchRow], windows: Sequence[int | None]) -> None:
        device = rows[0].fused.storage.device
        self._inputs = torch.zeros(3, len(rows), dtype=torch.long, device=device)
        self._graph = torch.cuda.CUDAGraph()
        # Other threads go on loading meanwhile.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._logits = step(self._inputs[0], BatchRows(rows, windows, self._inputs[1:]))

    def run(self, token_ids: Sequence[int], rows: Sequence[BatchRow]) -> torch.Tensor:
        """Return logits ``[B, vocabulary]`` for tokens at the places of `rows`."""
        places = [row.place for row in rows]
        positions = [row.position for row in rows]
        self._inputs.copy_(torch.tensor([list(token_ids), places, positions]))
        self._graph.replay()
        return self._logits.clone()
