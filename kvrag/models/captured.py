"""Steps of a batch on a GPU, captured once and replayed: Python leaves the loop over layers.

A step starts hundreds of small kernels, and starting them takes Python far longer than the GPU
takes to run them. A CUDA graph starts them all at once. It reads tokens, places and positions from
its own memory. It writes to the buffers of the step that it was captured from.

Steps are captured where the environment has ``KVRAG_CUDA_GRAPHS=1``. After a capture that fails,
PyTorch's generator for the GPU and its allocator may believe that a capture is under way. Answers
then end with an error until the process is started again.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel

from kvrag.errors import KVRagError
from kvrag.kvcache import FusedKV
from kvrag.models.batch import KEY_BLOCK, BatchRow, BatchRows

# A capture stops the GPU for tens of milliseconds, so the batch has to have stayed the same.
_STEPS_BEFORE = 3
# Answers that are written by turns, each alone, keep their graphs. All are dropped together: with
# one of them, PyTorch drops what others on its stream compute in.
_MOST_GRAPHS = 8
_MOST_COUNTS = 64
Step = Callable[[torch.Tensor, BatchRows], torch.Tensor]
"""Takes tokens ``[B]`` and where they belong; returns logits ``[B, vocabulary]``."""

_Key = tuple[tuple[int, ...], ...]

# A process captures one graph at a time.
_capturing = threading.Lock()
# Why a capture failed, of any model. After it, no other capture is sound.
_failures: list[str] = []


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

    def __init__(self, hf: PreTrainedModel, windows: Sequence[int | None]) -> None:
        self._hf = hf
        self._windows = windows
        self._steps: dict[_Key, CapturedStep] = {}
        self._counts: OrderedDict[_Key, int] = OrderedDict()
        self._has_hooks = False
        self._state: tuple[object, ...] = ()
        self._stream: torch.cuda.Stream | None = None

    def check_model(self) -> None:
        """Forget all steps if weights have moved or modules have changed since the last call.

        Call it before each answer, outside the model's use: within, modules are not their own.
        """
        if not captures_steps() or self._hf.device.type != "cuda":
            return
        state = _state_of(self._hf)
        if state != self._state:
            self._forget()
            self._counts.clear()
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

        Raises
        ------
        KVRagError
            If a capture fails, or one has failed in this process.
        """
        if not _is_on_gpu(rows[0].fused) or not captures_steps():
            return None
        if _failures:
            raise KVRagError(_failures[0])
        if self._has_hooks:
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
    ) -> CapturedStep:
        del self._counts[key]
        device = rows[0].fused.storage.device
        if len(self._steps) >= _MOST_GRAPHS:
            self._forget()
        if self._stream is None:
            # Loading threads never get a stream of this priority.
            self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        try:
            with _capturing:
                if _failures:
                    raise KVRagError(_failures[0])
                found = CapturedStep(step, rows, self._windows, ends, self._stream)
        except RuntimeError as error:
            # Some models ask the GPU for a number in the middle of a step; or memory is short.
            told = str(error.__context__ or error).partition("\n")[0]
            _failures.append(
                f"a step of an answer cannot be captured as a CUDA graph: {told}. Unset "
                "KVRAG_CUDA_GRAPHS and start the process again: PyTorch may believe that this one "
                "still captures"
            )
            raise KVRagError(_failures[0]) from error
        self._steps[key] = found
        return found


def captures_steps() -> bool:
    """Return whether steps are to be captured."""
    return os.environ.get("KVRAG_CUDA_GRAPHS", "") not in ("", "0")


def _is_on_gpu(fused: FusedKV) -> bool:
    return fused.storage.device.type == "cuda"


def _end_of(row: BatchRow) -> int:
    """Return the number of keys that a captured step over a row attends to."""
    return min(-(-(row.place + 1) // KEY_BLOCK) * KEY_BLOCK, row.fused.capacity)


def _state_of(hf: PreTrainedModel) -> tuple[object, ...]:
    """Return what a graph relies on: where weights are, and what the modules do."""
    return (
        getattr(hf.config, "_attn_implementation", None),
        *(tensor.data_ptr() for tensor in (*hf.parameters(), *hf.buffers())),
        *(
            # An adapter's flags are PEFT's.
            (
                id(module),
                id(vars(module).get("forward")),
                str(vars(module).get("_active_adapter")),
                vars(module).get("_disable_adapters"),
            )
            for module in hf.modules()
        ),
    )


class CapturedStep:
    """A step over certain buffers.

    Parameters
    ----------
    step
        The step, carried out before.
    rows
        Rows of the buffers.
    windows
        Each layer's sliding window in tokens, None if it sees everything.
    ends
        For each row, the number of keys that it attends to, those after it masked.
    stream
        A stream of the buffers' device, on which nothing else runs.
    """

    def __init__(
        self,
        step: Step,
        rows: Sequence[BatchRow],
        windows: Sequence[int | None],
        ends: Sequence[int],
        stream: torch.cuda.Stream,
    ) -> None:
        device = rows[0].fused.storage.device
        # Not inference tensors, even if the caller is in inference mode: they outlive this call.
        with torch.inference_mode(False), torch.no_grad(), torch.cuda.device(device):
            before = torch.cuda.current_stream(device)
            # Each thread makes its own, which cannot be captured.
            torch.cuda.current_blas_handle()  # type: ignore[no-untyped-call]
            self._inputs = torch.zeros(3, len(rows), dtype=torch.long, device=device)
            self._graph = torch.cuda.CUDAGraph()
            try:
                # Other threads go on loading meanwhile.
                with torch.cuda.graph(
                    self._graph, stream=stream, capture_error_mode="thread_local"
                ):
                    batch = BatchRows(rows, windows, self._inputs[1:], ends)
                    self._logits = step(self._inputs[0], batch)
            finally:
                torch.cuda.set_stream(before)  # torch leaves its own where a capture fails

    def run(self, token_ids: Sequence[int], rows: Sequence[BatchRow]) -> torch.Tensor:
        """Return logits ``[B, vocabulary]`` for tokens at the places of `rows`."""
        places = [row.place for row in rows]
        positions = [row.position for row in rows]
        with torch.cuda.device(self._inputs.device):
            self._inputs.copy_(torch.tensor([list(token_ids), places, positions]))
            self._graph.replay()
            return self._logits.clone()
