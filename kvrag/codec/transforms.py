"""Transforms: a chunk's KV to rows of numbers that are cheap to code, and back.

A *block* covers some layers and one or both kinds (keys, values). Its N channels are numbered
layer by layer, then kind by kind, then head by head. A transform turns the channels ``[N, T]`` of
a block into a matrix of rows. A quantiser and an entropy coder follow. `kvrag.codec.pca` has the
transform to principal components.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from kvrag.errors import ParameterError, ProfileError
from kvrag.kvcache import ChunkKV, KVSpec

KINDS = ("keys", "values")


SAMPLE_TOKENS = 16_384
"""How many tokens most transforms are fitted to."""
FEW_TOKENS = 512
"""How many tokens any transform needs."""


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


MOST_ENERGY = 9.0
"""A token whose energy exceeds the running mean by this factor is scaled down to it.

Otherwise a few attention sinks would determine the first components.
"""


class Moments:
    """Means and covariances of several matrices of equal width, in memory that does not grow.

    Attributes
    ----------
    count
        Number of tokens so far.
    """

    def __init__(self, num_matrices: int, width: int) -> None:
        self.count = 0
        self._shift: torch.Tensor | None = None  # the first chunk's means, to limit cancellation
        self._sums = torch.zeros(num_matrices, width, dtype=torch.float64)
        self._products = torch.zeros(num_matrices, width, width)
        self._energy = torch.zeros(num_matrices, dtype=torch.float64)

    def update(self, rows: torch.Tensor) -> None:
        """Add tokens: float32 ``[matrices, n, T]``."""
        if self._shift is None:
            self._shift = rows.mean(2, keepdim=True)
        rows = rows - self._shift
        self.count += rows.shape[2]
        energy = rows.square().sum(1)
        usual = energy.median(1, keepdim=True).values
        self._energy += energy.clamp(max=MOST_ENERGY * usual).sum(1)
        most = (MOST_ENERGY * self._energy / self.count).float()[:, None]
        rows *= torch.where(energy > most, (most / energy).sqrt(), 1.0)[:, None]
        self._sums += rows.sum(2)
        self._products.baddbmm_(rows, rows.transpose(1, 2))

    def of_each(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the mean float32 ``[n]`` and the covariance float64 ``[n, n]`` of each matrix."""
        if self._shift is None or self.count < 2:
            raise ParameterError(f"a profile needs 2 tokens or more; found {self.count}")
        for sums, products, shift in zip(self._sums, self._products, self._shift, strict=True):
            mean = sums / self.count
            covariance = products.double() / self.count - mean[:, None] * mean
            yield (mean + shift[:, 0]).float(), (covariance + covariance.T) / 2


class FittedTransform:
    """A transform that has been fitted to a model.

    Attributes
    ----------
    plans
        The blocks, in the order in which they are stored.
    means
        float32 ``[N]`` for each block.
    """

    stored: ClassVar[Mapping[str, str]] = {"mean": "means"}
    """What a profile stores of each block, and the attribute that has it."""

    def __init__(
        self, spec: KVSpec, plans: tuple[BlockPlan, ...], means: list[torch.Tensor]
    ) -> None:
        self._spec, self.plans, self.means = spec, plans, means

    @abstractmethod
    def row_layers(self, block: int) -> torch.Tensor:
        """Return int64 ``[R]``: the layer of each of a block's rows, or -1 if it mixes several."""

    @abstractmethod
    def analyse(self, block: int, channels: torch.Tensor) -> torch.Tensor:
        """Return the rows float32 ``[R, T]`` of a block's channels ``[N, T]``."""

    @abstractmethod
    def synthesise(self, block: int, rows: torch.Tensor) -> torch.Tensor:
        """Return the channels float32 ``[N, T]`` of decoded rows."""

    def errors(self, block: int, found: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
        """Return each token's squared error ``[T]`` in the metric that the transform optimises."""
        del block
        return (found - true).square().sum(0)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors that a profile stores, by name."""
        return {
            f"{name}.{block}": tensor
            for name, attribute in self.stored.items()
            for block, tensor in enumerate(getattr(self, attribute))
        }


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


@dataclass(frozen=True)
class NoTransform:
    """No transform: one block for each layer, one row for each channel minus its mean.

    Means are subtracted: those of key channels are large and would cost bits in every token.

    Attributes
    ----------
    sample_tokens
        How many tokens a good sample has.
    is_fitted_late
        Whether it is fitted to records where that can wait, which costs no prefill.
    """

    name: ClassVar[str] = "none"
    sample_tokens: ClassVar[int] = SAMPLE_TOKENS
    is_fitted_late: ClassVar[bool] = False

    def tokens_to_fit(self, spec: KVSpec) -> int:
        """Return how many tokens an index must hold before it is fitted to them."""
        return FEW_TOKENS

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

    def finish(self) -> ChannelRows:
        """Return the fitted transform."""
        means = [(total / max(1, self._count)).float() for total in self._sums]
        return ChannelRows(self._spec, self._plans, means)


def load_means(
    spec: KVSpec, plans: tuple[BlockPlan, ...], tensors: Mapping[str, torch.Tensor]
) -> list[torch.Tensor]:
    """Return a profile's means, float32 ``[N]`` for each block. Raises ProfileError."""
    return [
        take_tensor(tensors, f"mean.{block}", [plan.num_channels(spec)], torch.float32)
        for block, plan in enumerate(plans)
    ]


class ChannelRows(FittedTransform):
    """Rows are channels minus their means."""

    def row_layers(self, block: int) -> torch.Tensor:
        """Return the layer of each channel."""
        plan = self.plans[block]
        width = len(plan.kinds) * self._spec.num_kv_heads * self._spec.head_dim
        return torch.arange(plan.num_channels(self._spec)) // width + plan.layers.start

    def analyse(self, block: int, channels: torch.Tensor) -> torch.Tensor:
        """Subtract the means."""
        return channels - self.means[block][:, None]

    def synthesise(self, block: int, rows: torch.Tensor) -> torch.Tensor:
        """Add the means."""
        return rows + self.means[block][:, None]
