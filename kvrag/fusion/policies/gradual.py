"""The policy ``gradual``: CacheBlend's gradual filtering, which narrows the choice per layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvrag.errors import ParameterError
from kvrag.fusion.policies.base import PromptRows, share_of
from kvrag.fusion.policies.deviation import DeviationPolicy


@dataclass(frozen=True)
class GradualPolicy(DeviationPolicy):
    """Start with more tokens than `ratio` and drop, layer by layer, those that deviate least.

    Source: CacheBlend (arXiv 2405.16444) §4.3, figure 9. Each layer drops the tokens whose stored
    KV was nearest to fresh KV in the layer before, so that the remaining tokens deviate in several
    layers. The mean share over the layers from 1 on is `ratio`.

    Deviations: the paper leaves the shares open; here they fall linearly from ``1 + spread`` to
    ``1 - spread`` times the ratio. A layer's deviation is measured while its K/V are written, so
    that nothing is projected twice; it decides for the next layer. On ``"attention"``, attention
    outputs decide only the first choice, and values decide the later ones.

    Parameters
    ----------
    ratio, on
        See `DeviationPolicy`.
    spread
        How far the shares fall around the mean, relative to it; above 0, up to 1.
    """

    name: ClassVar[str] = "gradual"
    spread: float = 0.25

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 < self.spread <= 1.0:
            raise ParameterError(
                f"gradual spread {self.spread}: expected more than 0, up to 1 (to choose only "
                "once, use policy 'deviation')"
            )

    def counts(self, prompt: PromptRows) -> Sequence[int] | None:
        if self.ratio == 1.0:
            return None
        falling = _falling_counts(self.ratio, self.spread, prompt.num_reused, prompt.num_layers - 1)
        return [falling[0] if self.on == "attention" else prompt.num_reused, *falling]


def _falling_counts(ratio: float, spread: float, num_tokens: int, num_layers: int) -> list[int]:
    """Return how many tokens each layer computes: falling counts, whose mean is `ratio`.

    No share may exceed 1, so a ratio above one half leaves less room to fall.
    """
    if num_layers == 1 or ratio == 0.0:
        return [share_of(ratio, num_tokens)] * num_layers
    reach = min(spread, 1.0 / ratio - 1.0)
    slope = 2.0 * reach / (num_layers - 1)
    exact = [num_tokens * ratio * (1.0 + reach - slope * layer) for layer in range(num_layers)]
    counts = [min(num_tokens, int(count + 1e-9)) for count in exact]
    missing = share_of(ratio, num_tokens * num_layers) - sum(counts)
    for layer, count in enumerate(counts):
        # From the first layer on, so that the counts never rise.
        if missing and count < num_tokens:
            counts[layer] += 1
            missing -= 1
    return counts
