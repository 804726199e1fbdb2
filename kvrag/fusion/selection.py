"""The rows that each layer computes, when a policy narrows its choice from layer to layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from kvrag.arguments import shown
from kvrag.errors import ParameterError
from kvrag.fusion.policies.base import CandidateStats, PromptRows, RecomputePolicy, highest
from kvrag.kvcache import FusedKV
from kvrag.models.attention import EncodedScope
from kvrag.models.caches import Deviation
from kvrag.models.kv_model import KVModel
from kvrag.positions.rotary import RotaryTable


class Selection:
    """The rows to compute: fresh rows in every layer, and the candidates that are not dropped.

    Parameters
    ----------
    policy
        Chooses the candidates and scores them.
    prompt
        The input of the policy.
    fresh
        ``[m]`` ascending positions of tokens that are not stored.
    encoded
        The rows that each row was encoded with, for a policy that chooses in layer 0; None if
        attention cannot be compared.

    Attributes
    ----------
    rows
        ``[n]`` ascending positions of the current layer's rows.
    picks
        For each layer entered so far, the positions of its candidates.
    num_compared
        Rows that a layer computed, in part, only to choose among them.
    """

    def __init__(
        self,
        policy: RecomputePolicy,
        prompt: PromptRows,
        fresh: torch.Tensor,
        encoded: EncodedScope | None,
    ) -> None:
        self._policy = policy
        self._prompt = prompt
        self._encoded = encoded
        candidates = policy.candidates(prompt)
        _require_reused(candidates, policy, prompt)
        candidates = candidates.to(fresh.device)
        self.rows, order = torch.cat([fresh, candidates]).sort()
        # Which of `rows` the policy may still drop; fresh rows never.
        self._optional = order >= len(fresh)
        # How many they are: to count them would wait for a GPU.
        self._num_optional = len(candidates)
        self._counts: Sequence[int] | None = policy.counts(prompt) if len(candidates) else None
        # The deviation of stored KV when they were last compared, for each of `rows`.
        self._deviation: dict[str, torch.Tensor] | None = None
        self._compared_layer: int | None = None
        self.picks: list[torch.Tensor] = []
        self.num_compared = 0

    def enter(
        self,
        layer_index: int,
        model: KVModel,
        hidden: torch.Tensor,
        fused: FusedKV,
        table: RotaryTable,
    ) -> torch.Tensor:
        """Drop the candidates that the policy no longer wants; return the remaining inputs.

        Parameters
        ----------
        layer_index
            The layer that is about to run.
        model
            The model.
        hidden
            ``[n, hidden]``: the layer's inputs for `rows`.
        fused
            The buffer, which holds the layer's stored KV.
        table
            The layer's rotary table.
        """
        count = None if self._counts is None else self._counts[layer_index]
        # K/V of layer 0 never differ: without attention to compare, the choice waits for layer 1.
        may_choose = layer_index > 0 or self._encoded is not None
        if count is not None and may_choose and count < self._num_optional:
            if self._deviation is None:
                self._deviation = self._compare(layer_index, model, hidden, fused, table)
                self._compared_layer = layer_index
            # Each rank knows its own heads' part of a distance; not kept, as it may serve twice.
            whole = {on: model.ranks.sum(far.clone()) for on, far in self._deviation.items()}
            chosen = self._choose(count, whole)
            self.rows, self._optional, hidden = (
                self.rows[chosen],
                self._optional[chosen],
                hidden[chosen],
            )
            self._deviation = {on: values[chosen] for on, values in self._deviation.items()}
            self._num_optional = count
            self.picks.append(self.rows[self._optional])
        else:
            self.picks.append(self.picks[-1] if self.picks else self.rows[self._optional])
        return hidden

    def noting(self, layer_index: int) -> Deviation | None:
        """Return the deviation that the layer's forward has to fill in; None if none is needed.

        The layer of the first choice has already been compared, and its K/V are now fresh.
        """
        if self._counts is None or self._deviation is None or layer_index == self._compared_layer:
            return None
        coming = self._counts[layer_index + 1 : layer_index + 2]
        if not coming or coming[0] == self._num_optional:
            return None
        noted = Deviation.empty(len(self.rows), self.rows.device)
        self._deviation = _named(noted)
        return noted

    def _choose(self, count: int, deviation: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the ascending indices into `rows` of the fresh rows and the best candidates."""
        which = self._optional.nonzero()[:, 0]
        stats = CandidateStats(self.rows[which], {on: far[which] for on, far in deviation.items()})
        kept = highest(self._policy.score(self._prompt, stats), count)
        chosen = ~self._optional
        chosen[which[kept]] = True
        return chosen.nonzero()[:, 0]

    def _compare(
        self,
        layer_index: int,
        model: KVModel,
        hidden: torch.Tensor,
        fused: FusedKV,
        table: RotaryTable,
    ) -> dict[str, torch.Tensor]:
        """Return the candidates' deviation in a layer that has not run yet.

        Layer 0 compares their attention outputs; later layers compare their stored K/V with fresh
        K/V, which then replace the stored ones.
        """
        if layer_index == 0:
            assert self._encoded is not None
            encoded = replace(self._encoded, starts=self._encoded.starts[self.rows])
            # Includes the fresh rows, because candidates see them.
            change = model.compare_rows(0, hidden, self.rows, fused, table, encoded=encoded)
            self.num_compared = len(self.rows)
            return {"attention": change}
        deviation = Deviation.empty(len(self.rows), self.rows.device)
        which = self._optional.nonzero()[:, 0]
        self.num_compared = len(which)
        stored = fused.keys[layer_index][0], fused.values[layer_index][0]
        for block, *fresh in model.project_rows(layer_index, hidden, self.rows, table, which):
            positions = self.rows[block]
            of_block = Deviation.empty(len(block), block.device)
            of_block.note(*(kv[:, positions] for kv in stored), *fresh)
            deviation.keys[block], deviation.values[block] = of_block.keys, of_block.values
            for kv, computed in zip(stored, fresh, strict=True):
                kv.index_copy_(1, positions, computed)
        return _named(deviation)


def _require_reused(candidates: torch.Tensor, policy: RecomputePolicy, prompt: PromptRows) -> None:
    """Raise ParameterError unless candidates are distinct positions of reused tokens."""
    reused = prompt.reused()
    here = candidates.to(reused.device)
    if (
        here.dtype.is_floating_point
        or here.dtype == torch.bool
        or here.dim() != 1
        or not torch.isin(here, reused).all()
        or (here.sort().values.diff() == 0).any()
    ):
        raise ParameterError(
            f"policy {policy}: expected candidates that are positions of reused tokens, each once; "
            f"found {shown(candidates.tolist())}; mend the policy (kvrag.testing.policy_contract)"
        )


def _named(deviation: Deviation) -> dict[str, torch.Tensor]:
    return {"k": deviation.keys, "v": deviation.values}
