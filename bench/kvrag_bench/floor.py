"""The least time a fused prompt could take on this machine: its matrix work and its bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import cast

import torch
from torch import nn

from kvrag.fusion.report import FusionReport
from kvrag.models.kv_model import KVModel

# From here on more rows bring no higher rate: the matrices' own size bounds it.
_FULL_RATE_ROWS = 256


def median_seconds(
    work: Callable[[], object], repeats: int = 3, device: torch.device | None = None
) -> float:
    """Return the median wall time of `work` over `repeats` runs, after one that does not count.

    What `work` starts on `device`, if that is a GPU, is part of it.
    """

    def wait() -> None:
        if device is not None and device.type == "cuda":
            torch.cuda.synchronize(device)

    work()
    times = []
    for _ in range(repeats):
        wait()
        started = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - started)
    return median(times)


@dataclass(frozen=True)
class Floor:
    """The least cost of a query.

    Attributes
    ----------
    matrix_seconds
        Its multiplications at the rate the model's own matrices reach here.
    copy_seconds
        Its stored bytes at the rate of a plain copy here: in memory, or from there to the GPU.
    """

    matrix_seconds: float
    copy_seconds: float

    @property
    def seconds(self) -> float:
        return self.matrix_seconds + self.copy_seconds


class FloorMeter:
    """Measures the machine's rates with a model's own matrices, then prices reports.

    The matrix work of n rows in a layer is that of its linear maps (``2 n`` operations per
    weight) and of attention (``4 n`` times query width times the mean number of visible keys).
    It is priced at the rate reached by the layers' linear maps alone on n rows: everything else
    (norms, softmax, rotation, Python, smaller blocks) is overhead.
    """

    def __init__(self, model: KVModel) -> None:
        self._model = model
        self._linears = [
            list(_linears(layer)) for layer in cast(nn.ModuleList, model.hf.base_model.layers)
        ]
        self._operations_per_second = cache(self._measure_operations_per_second)

    def measure(self, report: FusionReport) -> Floor:
        """Return the floor of the query that `report` accounts for."""
        config = self._model.hf.config
        spec = self._model.spec
        per_layer_weights = sum(_size(linear) for linear in self._linears[0])
        query_width = config.num_attention_heads * spec.head_dim
        # Fresh rows stand mostly at the end, recomputed ones anywhere: half the prompt is what
        # a row sees on average when all are computed, and a lower bound otherwise.
        mean_keys = report.num_tokens / 2
        per_row = 2 * per_layer_weights + 4 * query_width * mean_keys
        per_projection = 4 * spec.num_kv_heads * spec.head_dim * config.hidden_size
        device = self._model.device
        # On a GPU, few rows measure how long kernels take to start.
        most_rows = _FULL_RATE_ROWS if device.type == "cpu" else report.num_tokens
        seconds = 0.0
        before = 0
        for layer_index, num_rows in enumerate(report.rows_by_layer):
            if layer_index == spec.num_layers - 1:
                # The last layer needs only K/V, and one token's output.
                operations = per_row + num_rows * per_projection
            else:
                operations = num_rows * per_row
            if num_rows < before:
                # Rows that were dropped here were projected to be compared.
                operations += (before - num_rows) * per_projection
            before = num_rows
            at_once = min(num_rows, most_rows)
            seconds += operations / self._operations_per_second(at_once)
        head: nn.Module = self._model.hf.get_output_embeddings()  # type: ignore[no-untyped-call]
        hidden = torch.randn(1, config.hidden_size, dtype=spec.dtype, device=device)
        with torch.no_grad():
            seconds += median_seconds(lambda: head(hidden), device=device)
        return Floor(seconds, report.bytes_loaded / _bytes_per_second(device))

    def _measure_operations_per_second(self, num_rows: int) -> float:
        inputs = {
            linear.in_features: torch.randn(
                num_rows,
                linear.in_features,
                dtype=self._model.spec.dtype,
                device=self._model.device,
            )
            for linear in self._linears[0]
        }

        def multiply() -> None:
            # All layers in turn: their weights do not fit the cache together, as in a real pass.
            for layer in self._linears:
                for linear in layer:
                    linear(inputs[linear.in_features])

        weights = sum(_size(linear) for layer in self._linears for linear in layer)
        with torch.no_grad():
            return 2 * num_rows * weights / median_seconds(multiply, device=self._model.device)


@cache
def _bytes_per_second(device: torch.device) -> float:
    source = torch.ones(64 * 1024 * 1024 // 4, pin_memory=device.type == "cuda")
    target = torch.empty_like(source, device=device)
    return source.numel() * 4 / median_seconds(lambda: target.copy_(source), device=device)


def _size(linear: nn.Linear) -> int:
    return linear.in_features * linear.out_features


def _linears(layer: nn.Module) -> Iterator[nn.Linear]:
    return (module for module in layer.modules() if isinstance(module, nn.Linear))
