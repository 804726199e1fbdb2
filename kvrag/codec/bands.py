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

from kvrag.codec.transforms import (
    KINDS,
    BlockPlan,
    FittedTransform,
    Moments,
    load_means,
    take_tensor,
)
from kvrag.errors import ParameterError, ProfileError
from kvrag.kvcache import ChunkKV, KVSpec
from kvrag.native.packed import GROUP, MOST_BITS, USUAL, PackedBands, pack_rows

# A direction that hardly varies in the sample may vary more elsewhere.
_LEAST_VARIANCE = 1e-4
# Between the largest and the smallest row of a band. At 64, Gemma-3's errors double.
_MOST_UNITS = 16
# The fewest channels of a band, unless a layer has fewer.
_FEWEST_CHANNELS = 32
MOST_CHANNELS = 1024
# With as many, SmolLM2's and Gemma-3's answers change no more than with four times as many.
_FEW_TOKENS = 1024


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

    name: ClassVar[str] = "companded_bands"
    sample_tokens: ClassVar[int] = 4096
    is_fitted_late: ClassVar[bool] = True
    bits: float = 4.2
    most_channels: int = 128

    def __post_init__(self) -> None:
        if not 1.0 <= self.bits <= MOST_BITS or not GROUP <= self.most_channels <= MOST_CHANNELS:
            raise ParameterError(
                f"bands: expected 1 to {MOST_BITS} bits and {GROUP} to {MOST_CHANNELS} channels, "
                f"found {self.bits:g} and {self.most_channels}"
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
        counts = [n for n in range(1, channels + 1) if channels % n == 0]
        wide = [n for n in counts if channels // n <= self.most_channels]
        # Scales of narrow bands take more than their numbers.
        if channels // wide[0] < min(_FEWEST_CHANNELS, self.most_channels // 2):
            wide = [n for n in counts if channels // n <= MOST_CHANNELS][:1] or wide
        return wide[0]

    def tokens_to_fit(self, spec: KVSpec) -> int:
        """Return how many tokens an index must hold before it is fitted to them."""
        return max(_FEW_TOKENS, 8 * spec.num_kv_heads * spec.head_dim // self.num_bands(spec))

    def fitter(self, spec: KVSpec) -> BandsFitter:
        """Return an empty fitter."""
        return BandsFitter(spec, self)

    def load(self, spec: KVSpec, tensors: Mapping[str, torch.Tensor]) -> FittedBands:
        """Return the fitted transform that a profile stores. Raises ProfileError."""
        plans = self.plans(spec)
        # First: a forged header must not claim more channels than its tensors can describe.
        means = load_means(spec, plans, tensors)
        num_bands = self.num_bands(spec)
        channels = spec.num_kv_heads * spec.head_dim // num_bands
        numbers = -(-channels // GROUP) * GROUP
        of_blocks = [
            [
                take_tensor(tensors, f"{name}.{b}", [num_bands, *rest], kind)
                for b in range(len(plans))
            ]
            for name, rest, kind in (
                ("basis", (numbers, channels), torch.int8),
                ("scale", (), torch.float32),
                ("widths", (numbers // GROUP,), torch.uint8),
            )
        ]
        for block, width in enumerate(of_blocks[-1]):
            sums = width.long().sum(1)
            if bool((width > MOST_BITS).any()) or bool((sums != sums[0]).any()):
                raise ProfileError(
                    f"the profile's 'widths.{block}' are not of {MOST_BITS} bits at most, the same "
                    "sum in each band; fit it again with 'kvrag profile'"
                )
        return FittedBands(spec, plans, means, *of_blocks)


class BandsFitter:
    """Accumulates the covariance of each band."""

    def __init__(self, spec: KVSpec, transform: Bands) -> None:
        self._spec, self._transform = spec, transform
        num_bands = transform.num_bands(spec)
        width = spec.num_kv_heads * spec.head_dim // num_bands
        self._moments = Moments(len(KINDS) * spec.num_layers * num_bands, width)

    def update(self, kv: ChunkKV) -> None:
        """Add one chunk."""
        spec = self._spec
        both = torch.stack([kv.keys, kv.values], dim=1).float()
        width = spec.num_kv_heads * spec.head_dim // self._transform.num_bands(spec)
        self._moments.update(both.transpose(3, 4).reshape(-1, width, kv.num_tokens))

    def finish(self) -> FittedBands:
        """Return the bands' components, in order of falling variance."""
        transform, spec = self._transform, self._spec
        num_bands = transform.num_bands(spec)
        channels = spec.num_kv_heads * spec.head_dim // num_bands
        numbers = -(-channels // GROUP) * GROUP
        budget = round(numbers * transform.bits / GROUP)
        num_all = len(KINDS) * spec.num_layers * num_bands
        means = torch.empty(num_all, channels)
        bases = torch.zeros(num_all, numbers, channels, dtype=torch.int8)
        scales = torch.empty(num_all)
        widths = torch.empty(num_all, numbers // GROUP, dtype=torch.uint8)
        for band, (mean, covariance) in enumerate(self._moments.of_each()):
            means[band] = mean
            spread, vectors = torch.linalg.eigh(covariance)
            spread, rows = spread.flip(0).clamp(min=0), vectors.flip(1).T
            widths[band], usual = _widths(spread, numbers, budget)
            unit = usual / _USUAL[widths[band].long()].repeat_interleave(GROUP)
            # The band's rows share a scale: smaller ones would round to a basis that is singular.
            rows = rows * unit.clamp(min=unit.max() / _MOST_UNITS)[:channels, None]
            scales[band] = rows.abs().max() / 127
            bases[band, :channels] = (rows / scales[band]).round().to(torch.int8)
        of_blocks = [
            list(every.view(-1, num_bands, *every.shape[1:]).unbind(0))
            for every in (bases, scales, widths)
        ]
        of_means = list(means.view(-1, num_bands * channels).unbind(0))
        return FittedBands(spec, transform.plans(spec), of_means, *of_blocks)


_USUAL = torch.from_numpy(USUAL)
# What 0, 1, ... 6 bits leave of a variance.
_LOST = torch.tensor([1.0, 0.363, 0.118, 0.035, 0.0096, 0.0027, 0.00073], dtype=torch.float64)


def _widths(variance: torch.Tensor, numbers: int, budget: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return uint8 and float64 ``[numbers / 8]``: bits of each eight components, and their size.

    There are `budget` bits in all. Each goes where it lowers the error most.
    """
    floor = _LEAST_VARIANCE * float(variance.mean()) + 1e-30
    padded = torch.full((numbers,), floor, dtype=torch.float64)
    padded[: len(variance)] = variance.clamp(min=floor)
    usual = padded.view(-1, GROUP).log().mean(1).exp()
    gains = torch.cat([_LOST[:-1] - _LOST[1:], torch.zeros(1)])
    widths = torch.zeros(len(usual), dtype=torch.int64)
    for _ in range(budget):
        widths[(usual * gains[widths]).argmax()] += 1
    return widths.to(torch.uint8), padded.sqrt()


class FittedBands(FittedTransform):
    """Rows are the numbers of all bands before rounding.

    Attributes
    ----------
    bases
        int8 ``[bands, K, n]`` for each block.
    scales
        float32 ``[bands]`` for each block: what the basis is multiplied with.
    widths
        uint8 ``[bands, K / 8]`` for each block.
    """

    stored: ClassVar[Mapping[str, str]] = {
        **FittedTransform.stored,
        **{"basis": "bases", "scale": "scales", "widths": "widths"},
    }

    def __init__(
        self,
        spec: KVSpec,
        plans: tuple[BlockPlan, ...],
        means: list[torch.Tensor],
        bases: list[torch.Tensor],
        scales: list[torch.Tensor],
        widths: list[torch.Tensor],
    ) -> None:
        super().__init__(spec, plans, means)
        self.bases, self.scales, self.widths = bases, scales, widths
        self._inverses: dict[int, torch.Tensor] = {}
        self._sizes: dict[int, NDArray[np.float32]] = {}
        self._prepared: dict[int, PackedBands] = {}

    def row_layers(self, block: int) -> torch.Tensor:  # noqa: ARG002
        """Return nothing: no row is coded by a table."""
        return torch.empty(0, dtype=torch.int64)

    def analyse(self, block: int, channels: torch.Tensor) -> torch.Tensor:
        """Return ``[bands K, T]``: the least squares by the rounded basis."""
        num_bands, numbers, _ = self.bases[block].shape
        banded = self._numbers(block, channels).transpose(1, 2)
        return banded.reshape(num_bands * numbers, -1)

    def _numbers(self, block: int, channels: torch.Tensor) -> torch.Tensor:
        """Return ``[bands, T, K]``."""
        inverse = self._inverses.get(block)
        if inverse is None:
            basis = self.bases[block].double() * self.scales[block][:, None, None].double()
            inverse = torch.linalg.pinv(basis).float().contiguous()
            self._inverses[block] = inverse
        num_bands, width, _ = inverse.shape
        centred = (channels - self.means[block][:, None]).view(num_bands, width, -1)
        return centred.transpose(1, 2) @ inverse

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

    def pack(
        self, block: int, channels: torch.Tensor, rows: NDArray[np.uint8]
    ) -> NDArray[np.float64]:
        """Write the rows ``[T, bytes]`` of a block's channels ``[N, T]``; return what each loses.

        Bases are orthogonal except for rounding to 8 bits: errors of numbers are those of channels.
        """
        numbers, widths = self._numbers(block, channels), self.widths[block].numpy()
        sizes = self._sizes.get(block)
        if sizes is None:
            norms = self.bases[block].float().square().sum(2) * self.scales[block].square()[:, None]
            sizes = self._sizes[block] = norms.view(*widths.shape, GROUP).mean(2).numpy()
        lost: NDArray[np.float64] = pack_rows(numbers, widths, sizes, rows).sum(0, np.float64)
        return lost

    def synthesise(self, block: int, rows: torch.Tensor) -> torch.Tensor:
        """Return the channels float32 ``[N, T]`` of rows."""
        basis = self.bases[block].float() * self.scales[block][:, None, None]
        banded = rows.view(len(basis), basis.shape[1], -1)
        return (basis.transpose(1, 2) @ banded).flatten(0, 1) + self.means[block][:, None]
