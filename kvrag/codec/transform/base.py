"""What a transform is: the KV of a chunk to rows of numbers that are cheap to code, and back.

A *block* covers some layers and one or both kinds (keys, values). Its N channels are numbered
layer by layer, in each layer kind by kind, then head by head. A transform turns the channels
``[N, T]`` of a block into one or more matrices of rows; a quantiser and an entropy coder do
the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from kvrag.errors import ProfileError
from kvrag.kvcache import ChunkKV, KVSpec

KINDS = ("keys", "values")


def greatest_tame(dtype: torch.dtype) -> float:
    """Return the magnitude beyond which a token is kept raw whatever the profile says.

    Squares of greater numbers would overflow on their way through the transform, and in float16
    what comes back of a number near the greatest would be infinity.
    """
    return min(1e15, torch.finfo(dtype).max / 2)


@dataclass(frozen=True)
class BlockPlan:
    """What one block covers.

    Attributes
    ----------
    layers
        Consecutive layers.
    kinds
        ``("keys", "values")``, or one of them.
    """

    layers: range
    kinds: tuple[str, ...] = KINDS

    def num_channels(self, spec: KVSpec) -> int:
        """N."""
        return len(self.layers) * len(self.kinds) * spec.num_kv_heads * spec.head_dim

    def channels_of(self, spec: KVSpec, layer_index: int, kind: str) -> slice:
        """Return which channels are those of one layer and kind."""
        width = spec.num_kv_heads * spec.head_dim
        place = (layer_index - self.layers.start) * len(self.kinds) + self.kinds.index(kind)
        return slice(place * width, (place + 1) * width)

    def stack(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Return the channels ``[N, T]`` of keys and values ``[L, H, T, D]``, contiguous."""
        both = {"keys": keys, "values": values}
        layers = slice(self.layers.start, self.layers.stop)
        stacked = torch.stack([both[kind][layers].detach() for kind in self.kinds], dim=1)
        return stacked.transpose(3, 4).reshape(-1, keys.shape[2]).contiguous()

    def gather(self, kv: ChunkKV) -> torch.Tensor:
        """Return the channels of a chunk, float32 ``[N, T]``, contiguous."""
        return self.stack(kv.keys, kv.values).float()


@dataclass(frozen=True)
class MatrixPlan:
    """The rows of one matrix of a block.

    Attributes
    ----------
    num_rows
        R.
    segments
        int64 ``[R]``: rows of one segment are measured together by quantisers that scale tokens.
    layers
        int64 ``[R]``: the layer a row belongs to, or -1 where it mixes several.
    is_exact
        Whether the transform has quantised these rows itself, to whole numbers -127 to 127.
    """

    num_rows: int
    segments: torch.Tensor
    layers: torch.Tensor
    is_exact: bool = False

    @property
    def num_segments(self) -> int:
        """Segments there are."""
        return int(self.segments.max()) + 1 if len(self.segments) else 0


@dataclass(frozen=True)
class Analysis:
    """A block's matrices, float32 ``[R, T']`` each, and numbers beside them (float16)."""

    matrices: Sequence[torch.Tensor]
    side: torch.Tensor | None = None


class FittedTransform(Protocol):
    """A transform with what was learnt of a model."""

    @property
    def plans(self) -> tuple[BlockPlan, ...]:
        """The blocks, in the order in which they are stored."""
        ...

    def matrices(self, block: int) -> tuple[MatrixPlan, ...]:
        """Return the matrices of a block."""
        ...

    def widths(self, num_tokens: int) -> tuple[int, ...]:
        """Return the columns T' of each matrix of a block of T tokens."""
        ...

    def num_side(self, block: int, num_tokens: int) -> int:
        """Return how many numbers stand beside the matrices of a block."""
        ...

    def analyse(self, block: int, channels: torch.Tensor) -> Analysis:
        """Return the matrices of a block's channels ``[N, T]``."""
        ...

    def synthesise(self, block: int, analysis: Analysis, num_tokens: int) -> torch.Tensor:
        """Return channels float32 ``[N, T]`` from matrices with values as decoded."""
        ...

    def errors(self, block: int, found: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
        """Return each token's squared error ``[T]`` in the metric that is optimised."""
        ...

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return what a profile keeps of it, by name."""
        ...


class TransformFitter(Protocol):
    """Learns a transform from chunks, in memory that does not grow with them."""

    def update(self, kv: ChunkKV) -> None:
        """Take one chunk in."""
        ...

    def finish(self) -> FittedTransform:
        """Return what was learnt."""
        ...


class Transform(Protocol):
    """The hyperparameters of a transform: what a configuration names."""

    name: ClassVar[str]

    def plans(self, spec: KVSpec) -> tuple[BlockPlan, ...]:
        """Return the blocks it cuts a model's KV into."""
        ...

    def fitter(self, spec: KVSpec) -> TransformFitter:
        """Return an empty fitter."""
        ...

    def load(self, spec: KVSpec, tensors: Mapping[str, torch.Tensor]) -> FittedTransform:
        """Return the transform that a profile keeps.

        Raises ProfileError when tensors are missing or of the wrong shape.
        """
        ...


def take_tensor(
    tensors: Mapping[str, torch.Tensor], name: str, shape: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """Return a tensor of a profile, checked.

    Parameters
    ----------
    shape
        -1 allows any length from 0.

    Raises
    ------
    ProfileError
        When it is missing, of another shape or type, or holds NaN or infinity.
    """
    tensor = tensors.get(name)
    if tensor is None:
        raise ProfileError(f"the profile lacks {name!r}; fit it again with 'kvrag profile'")
    fits = len(tensor.shape) == len(shape) and all(
        wanted in (-1, found) for wanted, found in zip(shape, tensor.shape, strict=True)
    )
    if not fits or tensor.dtype != dtype:
        raise ProfileError(
            f"the profile's {name!r}: expected {dtype} {list(shape)}, found {tensor.dtype} "
            f"{list(tensor.shape)}; fit it again with 'kvrag profile'"
        )
    if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
        raise ProfileError(
            f"the profile's {name!r} holds NaN or infinity; fit it again with 'kvrag profile'"
        )
    return tensor
