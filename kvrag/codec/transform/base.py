"""The protocol of transforms: a chunk's KV to rows of numbers that are cheap to code, and back.

A *block* covers some layers and one or both kinds (keys, values). Its N channels are numbered
layer by layer, then kind by kind, then head by head. A transform turns the channels ``[N, T]`` of
a block into one or more matrices of rows. A quantiser and an entropy coder follow.
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
    """Return the magnitude above which a token is kept raw with any profile.

    In the transform, squares of greater numbers would overflow. In float16, a number near the
    greatest could be decoded as infinity.
    """
    return min(1e15, torch.finfo(dtype).max / 2)


@dataclass(frozen=True)
class BlockPlan:
    """The layers and kinds of one block.

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
        """Return the slice of channels of one layer and kind."""
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
        int64 ``[R]``: quantisers that scale tokens use one scale for the rows of a segment.
    layers
        int64 ``[R]``: the layer of a row, or -1 if it mixes several.
    is_exact
        Whether the transform has already quantised these rows, to whole numbers -127 to 127.
    """

    num_rows: int
    segments: torch.Tensor
    layers: torch.Tensor
    is_exact: bool = False

    @property
    def num_segments(self) -> int:
        """How many segments there are."""
        return int(self.segments.max()) + 1 if len(self.segments) else 0


@dataclass(frozen=True)
class Analysis:
    """A block's matrices, float32 ``[R, T']`` each, and further numbers, float16 (`side`)."""

    matrices: Sequence[torch.Tensor]
    side: torch.Tensor | None = None


class FittedTransform(Protocol):
    """A transform that has been fitted to a model."""

    @property
    def plans(self) -> tuple[BlockPlan, ...]:
        """The blocks, in the order in which they are stored."""
        ...

    def matrices(self, block: int) -> tuple[MatrixPlan, ...]:
        """Return the matrices of a block."""
        ...

    def widths(self, num_tokens: int) -> tuple[int, ...]:
        """Return the number of columns T' of each matrix of a block of T tokens."""
        ...

    def num_side(self, block: int, num_tokens: int) -> int:
        """Return how many numbers a block has besides its matrices."""
        ...

    def analyse(self, block: int, channels: torch.Tensor) -> Analysis:
        """Return the matrices of a block's channels ``[N, T]``."""
        ...

    def synthesise(self, block: int, analysis: Analysis, num_tokens: int) -> torch.Tensor:
        """Return the channels float32 ``[N, T]`` of decoded matrices."""
        ...

    def errors(self, block: int, found: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
        """Return each token's squared error ``[T]`` in the metric that the transform optimises."""
        ...

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors that a profile stores, by name."""
        ...


class TransformFitter(Protocol):
    """Fits a transform to chunks, in memory that does not grow with their number."""

    def update(self, kv: ChunkKV) -> None:
        """Add one chunk."""
        ...

    def finish(self) -> FittedTransform:
        """Return the fitted transform."""
        ...


class Transform(Protocol):
    """The hyperparameters of a transform, as in a configuration."""

    name: ClassVar[str]

    def plans(self, spec: KVSpec) -> tuple[BlockPlan, ...]:
        """Return the blocks that it divides a model's KV into."""
        ...

    def fitter(self, spec: KVSpec) -> TransformFitter:
        """Return an empty fitter."""
        ...

    def load(self, spec: KVSpec, tensors: Mapping[str, torch.Tensor]) -> FittedTransform:
        """Return the fitted transform that a profile stores.

        Raises ProfileError if tensors are missing or have the wrong shape.
        """
        ...


def take_tensor(
    tensors: Mapping[str, torch.Tensor], name: str, shape: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """Return a tensor of a profile, after checking it.

    Parameters
    ----------
    shape
        The expected shape; -1 allows any length from 0.

    Raises
    ------
    ProfileError
        If it is missing, has another shape or type, or holds NaN or infinity.
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
