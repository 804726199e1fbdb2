"""No transform: each row is a channel minus its mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from kvrag.codec.transform.base import Analysis, BlockPlan, MatrixPlan, take_tensor
from kvrag.kvcache import ChunkKV, KVSpec


@dataclass(frozen=True)
class NoTransform:
    """One block for each layer, one row for each channel.

    Means are subtracted: those of key channels are large and would cost bits in every token.
    """

    name: ClassVar[str] = "none"

    def plans(self, spec: KVSpec) -> tuple[BlockPlan, ...]:
        """Return one block for each layer."""
        return tuple(BlockPlan(range(index, index + 1)) for index in range(spec.num_layers))

    def fitter(self, spec: KVSpec) -> MeanFitter:
        """Return an empty fitter."""
        return MeanFitter(spec, self.plans(spec))

    def load(self, spec: KVSpec, tensors: Mapping[str, torch.Tensor]) -> ChannelRows:
        """Return the fitted transform that a profile stores. Raises ProfileError."""
        plans = self.plans(spec)
        return ChannelRows(spec, plans, load_means(spec, plans, tensors))


class MeanFitter:
    """Learns the mean of every channel."""

    def __init__(self, spec: KVSpec, plans: tuple[BlockPlan, ...]) -> None:
        self._spec = spec
        self._plans = plans
        self._sums = [torch.zeros(plan.num_channels(spec), dtype=torch.float64) for plan in plans]
        self._count = 0

    def update(self, kv: ChunkKV) -> None:
        """Add one chunk."""
        for plan, total in zip(self._plans, self._sums, strict=True):
            total += plan.gather(kv).double().sum(1)
        self._count += kv.num_tokens

    def means(self) -> list[torch.Tensor]:
        """Return the means, float32 ``[N]`` for each block."""
        return [(total / max(1, self._count)).float() for total in self._sums]

    def finish(self) -> ChannelRows:
        """Return the fitted transform."""
        return ChannelRows(self._spec, self._plans, self.means())


def load_means(
    spec: KVSpec, plans: tuple[BlockPlan, ...], tensors: Mapping[str, torch.Tensor]
) -> list[torch.Tensor]:
    """Return a profile's means, float32 ``[N]`` for each block. Raises ProfileError."""
    return [
        take_tensor(tensors, f"mean.{block}", [plan.num_channels(spec)], torch.float32)
        for block, plan in enumerate(plans)
    ]


def channel_matrix(spec: KVSpec, plan: BlockPlan, is_exact: bool = False) -> MatrixPlan:
    """Return a matrix whose rows are a block's channels, with a segment for each layer and kind."""
    width = spec.num_kv_heads * spec.head_dim
    num_rows = plan.num_channels(spec)
    segments = torch.arange(num_rows) // width
    layers = segments // len(plan.kinds) + plan.layers.start
    return MatrixPlan(num_rows, segments, layers, is_exact)


class ChannelRows:
    """Rows are channels minus their means (a `FittedTransform`).

    Attributes
    ----------
    means
        float32 ``[N]`` for each block.
    """

    def __init__(
        self, spec: KVSpec, plans: tuple[BlockPlan, ...], means: list[torch.Tensor]
    ) -> None:
        self.plans = plans
        self.means = means
        self._matrices = [(channel_matrix(spec, plan),) for plan in plans]

    def matrices(self, block: int) -> tuple[MatrixPlan, ...]:
        """Return the one matrix of a block."""
        return self._matrices[block]

    def widths(self, num_tokens: int) -> tuple[int, ...]:
        """Return the number of columns of each matrix of a block."""
        return (num_tokens,)

    def num_side(self, block: int, num_tokens: int) -> int:
        """Return 0: a block is its matrix."""
        return 0

    def analyse(self, block: int, channels: torch.Tensor) -> Analysis:
        """Subtract the means."""
        return Analysis([channels - self.means[block][:, None]])

    def synthesise(self, block: int, analysis: Analysis, num_tokens: int) -> torch.Tensor:
        """Add the means."""
        return analysis.matrices[0] + self.means[block][:, None]

    def errors(self, block: int, found: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
        """Return each token's squared error ``[T]``."""
        return (found - true).square().sum(0)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the means by name."""
        return {f"mean.{block}": mean for block, mean in enumerate(self.means)}
