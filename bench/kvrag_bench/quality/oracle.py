"""The tokens that are truly furthest off: what no policy can know, and each can be held against."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from kvrag.fusion.fuser import FusedPrompt, fuse
from kvrag.fusion.layout import Layout
from kvrag.fusion.loader import OpenKV
from kvrag.fusion.policies.base import (
    NonePolicy,
    PromptRows,
    RecomputePolicy,
    check_ratio,
    highest,
    share_of,
)
from kvrag.fusion.repair import Repair, make_repair
from kvrag.kvcache import FusedKV
from kvrag.models.kv_model import KVModel
from kvrag_bench.judge.judgements import Contestant

ORACLE = "oracle"


@dataclass(frozen=True)
class TrueDeviation:
    """How far stored KV of a prompt are from those of a full prefill.

    Attributes
    ----------
    keys, values
        ``[L, N]`` float32: distance over the latter's length.
    """

    keys: torch.Tensor
    values: torch.Tensor

    @classmethod
    def of(cls, model: KVModel, layout: Layout, open_kv: OpenKV) -> TrueDeviation:
        """Fill a prompt's KV in both ways and compare them."""
        full = fill(model, replace(layout, spans=()), open_kv, NonePolicy()).kv
        stored = fill(model, layout, open_kv, NonePolicy()).kv
        return cls(_relative(stored.keys, full.keys), _relative(stored.values, full.values))


@dataclass(frozen=True, eq=False)
class OraclePolicy(RecomputePolicy):
    """Compute the tokens again whose KV are furthest off over all layers.

    Parameters
    ----------
    ratio
        Share of the reused, inexact tokens, 0..1.
    deviation
        Of this prompt.
    """

    name: ClassVar[str] = ORACLE
    ratio: float
    deviation: TrueDeviation

    def __post_init__(self) -> None:
        check_ratio(self.ratio)

    def candidates(self, prompt: PromptRows) -> torch.Tensor:
        reused = prompt.reused()
        total = (self.deviation.keys + self.deviation.values).sum(dim=0)
        return reused[highest(total[reused], share_of(self.ratio, len(reused)))]

    def __str__(self) -> str:
        return f"{self.name}(ratio={self.ratio})"


def policy_of(contestant: Contestant, deviation: Callable[[], TrueDeviation]) -> Repair:
    """Return a contestant's policy; only ``oracle`` calls `deviation`."""
    if contestant.policy != ORACLE:
        return make_repair(contestant.policy, ratio=contestant.ratio)
    assert contestant.ratio is not None
    return Repair(OraclePolicy(contestant.ratio, deviation()))


def fill(
    model: KVModel, layout: Layout, open_kv: OpenKV, policy: Repair | RecomputePolicy
) -> FusedPrompt:
    """Fuse a prompt into a separate buffer."""
    num_tokens = len(layout.token_ids)
    buffer = FusedKV(model.spec, num_tokens, num_tokens, model.device)
    return fuse(model, layout, open_kv, policy, buffer)


def _relative(stored: list[torch.Tensor], full: list[torch.Tensor]) -> torch.Tensor:
    layers = []
    for one, other in zip(stored, full, strict=True):
        difference = (one - other)[0].float().square().sum(dim=(0, 2)).sqrt()
        length = other[0].float().square().sum(dim=(0, 2)).sqrt()
        layers.append(difference / length.clamp_min(1e-12))
    return torch.stack(layers).cpu()
