"""CacheGen's change-based encoding: an anchor token in every group, the others as differences.

Source: CacheGen (SIGCOMM 2024, section 5.2). Groups have 10 tokens. The first token of a group is
its anchor, coded in 8 bits. The other nine are coded as differences from the anchor, not from their
neighbours, so that all can be decoded in parallel. Differences are taken from the decoded anchor,
so that its error is not added. The paper gives no scale for the anchors; here it is the greatest
magnitude of the token in each layer and kind.

The gain depends on the model: on kvrag-tiny and MiniLM the differences vary more than the values
themselves, and this transform loses (``kvrag bench codec``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from kvrag.codec.transform.base import Analysis, BlockPlan, MatrixPlan
from kvrag.codec.transform.none import MeanFitter, NoTransform, channel_matrix, load_means
from kvrag.errors import ParameterError
from kvrag.kvcache import ChunkKV, KVSpec

ANCHOR_LEVELS = 127


@dataclass(frozen=True)
class AnchorDelta:
    """Anchors and differences.

    Attributes
    ----------
    group
        Tokens of a group, its anchor included.
    """

    name: ClassVar[str] = "anchor_delta"
    group: int = 10

    def __post_init__(self) -> None:
        if not 2 <= self.group <= 1024:
            raise ParameterError(f"anchor_delta: group must be 2 to 1024, found {self.group}")

    def plans(self, spec: KVSpec) -> tuple[BlockPlan, ...]:
        """Return one block for each layer."""
        return NoTransform().plans(spec)

    def fitter(self, spec: KVSpec) -> AnchorDeltaFitter:
        """Return an empty fitter."""
        return AnchorDeltaFitter(spec, self)

    def load(self, spec: KVSpec, tensors: Mapping[str, torch.Tensor]) -> AnchorDeltaRows:
        """Return the fitted transform that a profile stores. Raises ProfileError."""
        plans = self.plans(spec)
        return AnchorDeltaRows(spec, plans, load_means(spec, plans, tensors), self.group)


class AnchorDeltaFitter:
    """Learns the mean of every channel: anchors are coded minus their means."""

    def __init__(self, spec: KVSpec, transform: AnchorDelta) -> None:
        self._spec = spec
        self._transform = transform
        self._means = MeanFitter(spec, transform.plans(spec))

    def update(self, kv: ChunkKV) -> None:
        """Add one chunk."""
        self._means.update(kv)

    def finish(self) -> AnchorDeltaRows:
        """Return the fitted transform."""
        plans = self._transform.plans(self._spec)
        return AnchorDeltaRows(self._spec, plans, self._means.means(), self._transform.group)


class AnchorDeltaRows:
    """For each block, a matrix of anchors and one of differences (a `FittedTransform`)."""

    def __init__(
        self, spec: KVSpec, plans: tuple[BlockPlan, ...], means: list[torch.Tensor], group: int
    ) -> None:
        self.plans = plans
        self._means = means
        self._group = group
        self._matrices = [
            (channel_matrix(spec, plan, is_exact=True), channel_matrix(spec, plan))
            for plan in plans
        ]

    def matrices(self, block: int) -> tuple[MatrixPlan, ...]:
        """Return the matrix of anchors and the matrix of differences."""
        return self._matrices[block]

    def widths(self, num_tokens: int) -> tuple[int, ...]:
        """Return the number of anchors and the number of other tokens."""
        num_anchors = -(-num_tokens // self._group)
        return num_anchors, num_tokens - num_anchors

    def num_side(self, block: int, num_tokens: int) -> int:
        """Return the number of scales: one for each segment and anchor."""
        return self._num_segments(block) * self.widths(num_tokens)[0]

    def analyse(self, block: int, channels: torch.Tensor) -> Analysis:
        """Return anchors as whole numbers, differences, and the anchors' scales."""
        centred = channels - self._means[block][:, None]
        is_anchor = self._is_anchor(channels.shape[1])
        anchors = centred[:, is_anchor]
        by_segment = anchors.view(self._num_segments(block), -1, anchors.shape[1])
        # Larger than needed, since it is rounded to float16: no anchor may exceed its scale.
        scale = (by_segment.abs().amax(1) * (1 + 2**-10) / ANCHOR_LEVELS).clamp(2.0**-24, 65504.0)
        scale = scale.half()
        step = scale.float()[:, None]
        levels = (by_segment / step).round().clamp(-ANCHOR_LEVELS, ANCHOR_LEVELS)
        base = (levels * step).view_as(anchors)
        differences = centred[:, ~is_anchor] - base[:, self._group_of(channels.shape[1])]
        return Analysis([levels.reshape(anchors.shape), differences], scale.flatten())

    def synthesise(self, block: int, analysis: Analysis, num_tokens: int) -> torch.Tensor:
        """Add the anchors to their differences, and the means to all tokens."""
        levels, differences = analysis.matrices
        assert analysis.side is not None
        step = analysis.side.float().view(self._num_segments(block), 1, -1)
        base = (levels.view(step.shape[0], -1, step.shape[2]) * step).view_as(levels)
        is_anchor = self._is_anchor(num_tokens)
        channels = torch.empty(len(levels), num_tokens)
        channels[:, is_anchor] = base
        channels[:, ~is_anchor] = differences + base[:, self._group_of(num_tokens)]
        return channels + self._means[block][:, None]

    def errors(self, block: int, found: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
        """Return each token's squared error ``[T]``."""
        return (found - true).square().sum(0)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the means by name."""
        return {f"mean.{block}": mean for block, mean in enumerate(self._means)}

    def _num_segments(self, block: int) -> int:
        return int(self._matrices[block][0].segments[-1]) + 1

    def _is_anchor(self, num_tokens: int) -> torch.Tensor:
        return torch.arange(num_tokens) % self._group == 0

    def _group_of(self, num_tokens: int) -> torch.Tensor:
        """Return the group of each token that is not an anchor."""
        tokens = torch.arange(num_tokens)
        return tokens[tokens % self._group != 0] // self._group
