"""Principal components: a basis in which the numbers of a token are uncorrelated.

A token's keys (before RoPE) and values in all layers are functions of one residual stream, so their
covariance is far from diagonal. In the basis of its eigenvectors, most components are nearly
constant and need no bits (transform coding; KVTC, 2025, does this for keys and values separately).

Errors are not weighted. Three weightings kept no more of kvrag-tiny's answers at equal rate:
dividing each layer and kind by its root mean square, the queries' second moment, and gradients.
`PCA.normalise` does the first, for models whose layers differ too much.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from kvrag.codec import transforms as t
from kvrag.errors import ParameterError
from kvrag.kvcache import ChunkKV, KVSpec
from kvrag.process import memory_bytes

BASIS_DTYPE = torch.float16
_MOST_DOUBLE = 1536
_MOST_CHANNELS = 6144
_FEW_CHANNELS = 1536
_FEW_LAYERS = 3
# Keeps a layer that hardly varies from being scaled up to the others' size.
_LEAST_VARIANCE = 1e-4


@dataclass(frozen=True)
class PCA:
    """Principal components of groups of layers.

    Attributes
    ----------
    group_layers
        Layers of a group. 0 means as many as have 1,536 channels together, or in wide models up to
        three layers with at most 6,144 channels. Larger groups give smaller records. A group of N
        channels, R of whose components are coded, costs ``N^3`` operations to fit and ``2 N R`` a
        token to decode: with these groups at most 3 % of a prefill (``kvrag bench codec``).
    joint
        Whether keys and values share one basis, if those of one layer have at most 6,144 channels.
    normalise
        Whether channels are first divided by the root mean square of their layer and kind.
    """

    name: ClassVar[str] = "pca"
    sample_tokens: ClassVar[int] = t.SAMPLE_TOKENS
    is_fitted_late: ClassVar[bool] = False
    group_layers: int = 0
    joint: bool = True
    normalise: bool = False

    def __post_init__(self) -> None:
        if self.group_layers < 0:
            raise ParameterError(f"pca: group_layers must be at least 0, found {self.group_layers}")

    def tokens_to_fit(self, spec: KVSpec) -> int:
        """Return how many tokens an index must hold before it is fitted to them.

        More than a block has channels. SmolLM2 has 1,536: the error of 4 bits an element is 11 to
        18 % of the variance if they are fitted on 512 tokens, 2 to 3 % on 1,024, 0.04 % on 2,048
        and 0.03 % on 4,096 or more.
        """
        widest = max(plan.num_channels(spec) for plan in self.plans(spec))
        return max(t.FEW_TOKENS, 8 * widest // 3)

    def plans(self, spec: KVSpec) -> tuple[t.BlockPlan, ...]:
        """Return a block for each group of layers, or for each kind of each group."""
        width = 2 * spec.num_kv_heads * spec.head_dim
        most = min(_MOST_CHANNELS, max(_FEW_CHANNELS, _FEW_LAYERS * width))
        num_groups = -(-spec.num_layers * width // most)
        size = self.group_layers or -(-spec.num_layers // min(num_groups, spec.num_layers))
        groups = [
            range(start, min(start + size, spec.num_layers))
            for start in range(0, spec.num_layers, size)
        ]
        is_joint = self.joint and width <= _MOST_CHANNELS
        kinds: list[tuple[str, ...]] = [t.KINDS] if is_joint else [(kind,) for kind in t.KINDS]
        return tuple(t.BlockPlan(layers, which) for layers in groups for which in kinds)

    def fitter(self, spec: KVSpec) -> PCAFitter:
        """Return an empty fitter. It keeps ``N^2`` numbers a block for a corpus of any size."""
        needed = sum(4 * plan.num_channels(spec) ** 2 for plan in self.plans(spec))
        if needed > memory_bytes() / 2:
            raise ParameterError(
                f"pca: the covariances of a model of {spec.num_layers} layers of "
                f"{spec.num_kv_heads} x {spec.head_dim} key/value channels take {needed / 1e9:.0f} "
                "GB, more than half of this machine's memory; use codec cachegen or a larger one"
            )
        return PCAFitter(spec, self)

    def load(self, spec: KVSpec, tensors: Mapping[str, torch.Tensor]) -> Components:
        """Return the fitted transform that a profile stores. Raises ProfileError."""
        plans = self.plans(spec)
        means = t.load_means(spec, plans, tensors)
        weights, bases = [], []
        for block, plan in enumerate(plans):
            size = plan.num_channels(spec)
            weights.append(t.take_tensor(tensors, f"weight.{block}", [size], torch.float32))
            bases.append(t.take_tensor(tensors, f"basis.{block}", [-1, size], BASIS_DTYPE))
        return Components(spec, plans, means, weights, bases)


class PCAFitter:
    """Accumulates the covariance of every block."""

    def __init__(self, spec: KVSpec, transform: PCA) -> None:
        self._spec = spec
        self._transform = transform
        self._plans = transform.plans(spec)
        self._moments = [t.Moments(1, plan.num_channels(spec)) for plan in self._plans]

    def update(self, kv: ChunkKV) -> None:
        """Add one chunk."""
        for plan, moments in zip(self._plans, self._moments, strict=True):
            moments.update(plan.gather(kv)[None])

    def finish(self) -> Components:
        """Return the components, in order of falling variance."""
        means, weights, bases = [], [], []
        for plan, moments in zip(self._plans, self._moments, strict=True):
            ((mean, covariance),) = moments.of_each()
            means.append(mean)
            weight = self._weights(plan, covariance.diagonal())
            weights.append(weight.float())
            # Centred numbers of T tokens span T - 1 directions at most.
            rank = min(len(mean), moments.count - 1)
            scaled = covariance * weight * weight[:, None]
            # Single precision only for large bases, for which double would take minutes.
            precision = torch.float64 if len(mean) <= _MOST_DOUBLE else torch.float32
            _, vectors = torch.linalg.eigh(scaled.to(precision))
            bases.append(vectors[:, -rank:].flip(1).T.contiguous().to(BASIS_DTYPE))
        return Components(self._spec, self._plans, means, weights, bases)

    def _weights(self, plan: t.BlockPlan, variance: torch.Tensor) -> torch.Tensor:
        weight = torch.ones_like(variance)
        if not self._transform.normalise:
            return weight
        for layer_index in plan.layers:
            for kind in plan.kinds:
                which = plan.channels_of(self._spec, layer_index, kind)
                least = _LEAST_VARIANCE * variance.mean() + 1e-30
                weight[which] = variance[which].mean().clamp(min=float(least)).rsqrt()
        return weight


class Components(t.FittedTransform):
    """Rows are components.

    Attributes
    ----------
    weights
        float32 ``[N]`` for each block.
    bases
        float16 ``[R, N]`` for each block: rows orthonormal in the weighted channels.
    """

    stored: ClassVar[Mapping[str, str]] = {"mean": "means", "weight": "weights", "basis": "bases"}

    def __init__(
        self,
        spec: KVSpec,
        plans: tuple[t.BlockPlan, ...],
        means: list[torch.Tensor],
        weights: list[torch.Tensor],
        bases: list[torch.Tensor],
    ) -> None:
        super().__init__(spec, plans, means)
        self.weights, self.bases = weights, bases
        self._wide: dict[int, torch.Tensor] = {}
        self._on_device: dict[torch.device, list[torch.Tensor]] = {}

    def row_layers(self, block: int) -> torch.Tensor:
        """Return -1 for each component: it mixes the layers of its block."""
        return torch.full((len(self.bases[block]),), -1)

    def analyse(self, block: int, channels: torch.Tensor) -> torch.Tensor:
        """Return the components of the weighted channels, minus their means."""
        centred = channels - self.means[block][:, None]
        return self._basis(block) @ (centred * self.weights[block][:, None])

    def synthesise(self, block: int, rows: torch.Tensor) -> torch.Tensor:
        """Return the channels. The last rows, if not decoded, may be missing."""
        channels = self._basis(block)[: len(rows)].T @ rows
        return channels / self.weights[block][:, None] + self.means[block][:, None]

    def errors(self, block: int, found: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
        """Return each token's weighted squared error ``[T]``."""
        return ((found - true) * self.weights[block][:, None]).square().sum(0)

    def synthesis_basis(
        self, block: int, layer_index: int, kind: str, steps: torch.Tensor
    ) -> torch.Tensor:
        """Return the matrix that turns symbols of R rows into one layer's channels.

        Parameters
        ----------
        steps
            float32 ``[R]``: the quantiser's step of each row.

        Returns
        -------
        torch.Tensor
            float32 ``[H, R, D]``, contiguous.
        """
        which = self.plans[block].channels_of(self._spec, layer_index, kind)
        basis = self.bases[block][: len(steps), which].float() / self.weights[block][which]
        basis = basis * steps[:, None]
        heads = basis.view(len(steps), self._spec.num_kv_heads, self._spec.head_dim)
        return heads.transpose(0, 1).contiguous()

    def mean_of(self, block: int, layer_index: int, kind: str) -> torch.Tensor:
        """Return the mean of one layer and kind, float32 ``[H, D]``."""
        which = self.plans[block].channels_of(self._spec, layer_index, kind)
        return self.means[block][which].view(self._spec.num_kv_heads, self._spec.head_dim)

    def bases_on(self, device: torch.device) -> list[torch.Tensor]:
        """Return the bases on a card, which all levels share."""
        if device not in self._on_device:
            self._on_device[device] = [basis.contiguous().to(device) for basis in self.bases]
        return self._on_device[device]

    def keep_rows(self, num_rows: Sequence[int]) -> Components:
        """Return a copy with at most `num_rows` components for each block."""
        bases = [basis[:n].clone() for basis, n in zip(self.bases, num_rows, strict=True)]
        return Components(self._spec, self.plans, self.means, self.weights, bases)

    def _basis(self, block: int) -> torch.Tensor:
        """Return a basis in float32, converted on first use."""
        found = self._wide.get(block)
        if found is None:
            found = self._wide[block] = self.bases[block].float()
        return found
