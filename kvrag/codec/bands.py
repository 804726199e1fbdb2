"""Principal components of narrow bands of channels, in 8 bits, with fixed widths of their numbers.

Bands are narrow, so few tokens fit them, and a kernel transforms back as fast as it can read. Bits
go where they lower the error most (reverse water-filling), the same number to every layer and kind:
errors then count by a layer's own variance, and each token has its own scales.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from kvrag.codec.pca import PCAFitter
from kvrag.codec.transforms import KINDS, BlockPlan, load_means, take_tensor
from kvrag.errors import ParameterError, ProfileError
from kvrag.kvcache import ChunkKV, KVSpec
from kvrag.native.packed import GROUP, MOST_BITS, SLACK, PackedBands, pack_rows, place_packed

# A direction that hardly varies in the sample may vary more elsewhere.
_LEAST_VARIANCE = 1e-4


@dataclass(frozen=True)
class Bands:
    """A basis for each band of a layer's keys or values.

    Attributes
    ----------
    bits
        Bits an element, a token's scales left out.
    most_channels
        A band's channels at most: fewer cost less to decode, more are smaller at equal error.
    """

    name: ClassVar[str] = "bands"
    bits: float = 4.2
    most_channels: int = 128

    def __post_init__(self) -> None:
        if not 1.0 <= self.bits <= MOST_BITS or not GROUP <= self.most_channels <= 1024:
            raise ParameterError(
                f"bands: expected 1 to {MOST_BITS} bits and {GROUP} to 1024 channels, found "
                f"{self.bits:g} and {self.most_channels}"
            )

    def plans(self, spec: KVSpec) -> tuple[BlockPlan, ...]:
        """Return one block for each layer and kind."""
        return tuple(
            BlockPlan(range(index, index + 1), (kind,))
            for index in range(spec.num_layers)
            for kind in KINDS
        )

    def num_bands(self, spec: KVSpec) -> int:
        """Return the number of bands of a layer and kind, equally wide."""
        channels = spec.num_kv_heads * spec.head_dim
        fewest = -(-channels // self.most_channels)
        return next(n for n in range(fewest, channels + 1) if channels % n == 0)

    def fitter(self, spec: KVSpec) -> BandsFitter:
        """Return an empty fitter."""
        return BandsFitter(spec, self)

    def load(self, spec: KVSpec, tensors: Mapping[str, torch.Tensor]) -> FittedBands:
        """Return the fitted transform that a profile stores. Raises ProfileError."""
        plans, num_bands = self.plans(spec), self.num_bands(spec)
        channels = spec.num_kv_heads * spec.head_dim // num_bands
        numbers = -(-channels // GROUP) * GROUP
        bases, scales, widths = [], [], []
        for block in range(len(plans)):
            basis = take_tensor(
                tensors, f"basis.{block}", [num_bands, numbers, channels], torch.int8
            )
            scale = take_tensor(tensors, f"scale.{block}", [num_bands], torch.float32)
            width = take_tensor(
                tensors, f"widths.{block}", [num_bands, numbers // GROUP], torch.uint8
            )
            sums = width.long().sum(1)
            if bool((width > MOST_BITS).any()) or bool((sums != sums[0]).any()):
                raise ProfileError(
                    f"the profile's 'widths.{block}' are not of {MOST_BITS} bits at most, the same "
                    "sum in each band; fit it again with 'kvrag profile'"
                )
            bases.append(basis)
            scales.append(scale)
            widths.append(width)
        return FittedBands(spec, plans, load_means(spec, plans, tensors), bases, scales, widths)


class BandsFitter:
    """Accumulates the covariance of each layer's keys and values."""

    def __init__(self, spec: KVSpec, transform: Bands) -> None:
        self._spec = spec
        self._transform = transform
        self._moments = PCAFitter(spec, transform.plans(spec))

    def update(self, kv: ChunkKV) -> None:
        """Add one chunk."""
        self._moments.update(kv)

    def finish(self) -> FittedBands:
        """Return the bands' components, in order of falling variance."""
        transform, spec = self._transform, self._spec
        num_bands = transform.num_bands(spec)
        means, bases, scales, widths = [], [], [], []
        for _, mean, covariance in self._moments.moments():
            channels = len(mean) // num_bands
            numbers = -(-channels // GROUP) * GROUP
            budget = round(numbers * transform.bits / GROUP)
            basis = torch.zeros(num_bands, numbers, channels, dtype=torch.int8)
            scale = torch.empty(num_bands)
            width = torch.empty(num_bands, numbers // GROUP, dtype=torch.uint8)
            for band in range(num_bands):
                part = slice(band * channels, (band + 1) * channels)
                spread, vectors = torch.linalg.eigh(covariance[part, part])
                spread, rows = spread.flip(0).clamp(min=0), vectors.flip(1).T
                step = rows.abs().max() / 127
                basis[band, :channels] = (rows / step).round().to(torch.int8)
                scale[band] = step * (spread.mean().sqrt() + 1e-12)
                width[band] = _widths(spread, numbers, budget)
            means.append(mean.float())
            bases.append(basis)
            scales.append(scale)
            widths.append(width)
        return FittedBands(spec, transform.plans(spec), means, bases, scales, widths)


def _widths(variance: torch.Tensor, numbers: int, budget: int) -> torch.Tensor:
    """Return uint8 ``[numbers / 8]``: the bits of each eight components, `budget` in all.

    A bit goes where it lowers the error most: it quarters what eight components lose.
    """
    floor = _LEAST_VARIANCE * float(variance.mean()) + 1e-30
    padded = torch.full((numbers,), floor, dtype=torch.float64)
    padded[: len(variance)] = variance.clamp(min=floor)
    worth = padded.view(-1, GROUP).log2().mean(1).numpy() / 2
    widths = np.zeros(len(worth), np.int64)
    for _ in range(budget):
        widths[np.argmax(np.where(widths < MOST_BITS, worth - widths, -np.inf))] += 1
    return torch.from_numpy(widths.astype(np.uint8))


class FittedBands:
    """Rows are the numbers of all bands before rounding (a `FittedTransform`).

    Attributes
    ----------
    means
        float32 ``[N]`` for each block.
    bases
        int8 ``[bands, K, n]`` for each block.
    scales
        float32 ``[bands]`` for each block: what the basis is multiplied with.
    widths
        uint8 ``[bands, K / 8]`` for each block.
    """

    def __init__(
        self,
        spec: KVSpec,
        plans: tuple[BlockPlan, ...],
        means: list[torch.Tensor],
        bases: list[torch.Tensor],
        scales: list[torch.Tensor],
        widths: list[torch.Tensor],
    ) -> None:
        self.plans = plans
        self.means = means
        self.bases = bases
        self.scales = scales
        self.widths = widths
        self._spec = spec
        self._inverses: dict[int, torch.Tensor] = {}
        self._prepared: dict[int, PackedBands] = {}

    def row_layers(self, block: int) -> torch.Tensor:  # noqa: ARG002
        """Return nothing: no row is coded by a table."""
        return torch.empty(0, dtype=torch.int64)

    def analyse(self, block: int, channels: torch.Tensor) -> torch.Tensor:
        """Return ``[bands K, T]``: the least squares by the rounded basis."""
        inverse = self._inverses.get(block)
        if inverse is None:
            basis = self.bases[block].double() * self.scales[block][:, None, None].double()
            inverse = torch.linalg.pinv(basis).transpose(1, 2).float().contiguous()
            self._inverses[block] = inverse
        num_bands, numbers, width = inverse.shape
        centred = (channels - self.means[block][:, None]).view(num_bands, width, -1)
        return (inverse @ centred).view(num_bands * numbers, -1)

    def prepared(self, block: int) -> PackedBands:
        """Return a block's bands as the kernels want them, made on first use."""
        found = self._prepared.get(block)
        if found is None:
            given = (self.widths, self.bases, self.scales, self.means)
            found = PackedBands(*(tensors[block].numpy() for tensors in given))
            self._prepared[block] = found
        return found

    def prepared_layer(self, layer_index: int) -> tuple[PackedBands, PackedBands]:
        """Return the bands of a layer's keys, and of its values."""
        return self.prepared(2 * layer_index), self.prepared(2 * layer_index + 1)

    def pack(self, block: int, channels: torch.Tensor) -> NDArray[np.uint8]:
        """Return the rows ``[T, bytes]`` of a block's channels ``[N, T]``."""
        widths, numbers = self.widths[block].numpy(), self.analyse(block, channels)
        banded = numbers.view(len(widths), -1, numbers.shape[1]).transpose(1, 2).contiguous()
        rows = np.empty((numbers.shape[1], self.prepared(block).row_bytes), np.uint8)
        for one, width, part in zip(banded, widths, np.hsplit(rows, len(widths)), strict=True):
            pack_rows(one, width, part)
        return rows

    def unpack(self, block: int, rows: NDArray[np.uint8]) -> torch.Tensor:
        """Return the channels float32 ``[N, T]`` of rows."""
        num_tokens, size = rows.shape
        out = torch.empty(1, num_tokens, len(self.means[block]))
        content = np.concatenate([rows.reshape(-1), np.zeros(SLACK, np.uint8)])
        place_packed(content, 0, size, slice(0, num_tokens), (self.prepared(block), out))
        return out[0].T

    def synthesise(self, block: int, rows: torch.Tensor) -> torch.Tensor:
        """Return the channels float32 ``[N, T]`` of rows."""
        basis = self.bases[block].float() * self.scales[block][:, None, None]
        banded = rows.view(len(basis), basis.shape[1], -1)
        return (basis.transpose(1, 2) @ banded).flatten(0, 1) + self.means[block][:, None]

    def errors(self, block: int, found: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
        """Return each token's squared error ``[T]``."""
        del block
        return (found - true).square().sum(0)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all by name."""
        named = {"mean": self.means, "basis": self.bases}
        named |= {"scale": self.scales, "widths": self.widths}
        return {
            f"{name}.{block}": tensor
            for name, tensors in named.items()
            for block, tensor in enumerate(tensors)
        }
