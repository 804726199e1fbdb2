"""Which rows of a prompt each layer computes, as the policy narrows them down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from kvrag.fusion.policies.base import CandidateStats, PromptRows, RecomputePolicy, highest
from kvrag.kvcache import FusedKV
from kvrag.models.attention import EncodedScope
from kvrag.models.caches import Deviation
from kvrag.models.kv_model import KVModel
from kvrag.positions.rotary import RotaryTable


class Selection:
    """The rows computed: fresh ones in every layer, and the policy's candidates while they last.

    Parameters
    ----------
    policy
        Names the candidates and their scores.
    prompt
        What the policy may know.
    fresh
        ``[m]`` ascending positions of tokens that are not stored.
    encoded
        What each row of the prompt was encoded with, for a policy that chooses in layer 0; None
        where attention cannot be compared.

    Attributes
    ----------
    rows
        ``[n]`` ascending positions of the rows of the present layer.
    picks
        For each layer begun so far, the positions of its candidates.
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
        candidates = policy.candidates(prompt).to(fresh.device)
        self.rows, order = torch.cat([fresh, candidates]).sort()
        # Which of `rows` the policy may still drop; fresh rows never.
        self._optional = order >= len(fresh)
        self._counts: Sequence[int] | None = policy.counts(prompt) if len(candidates) else None
        # How far stored KV were off where they were last looked at, for each of `rows`.
        self._deviation: dict[str, torch.Tensor] | None = None
        self._compared_layer: int | None = None
        self.picks: list[torch.Tensor] = []

    def enter(
        self,
        layer_index: int,
        model: KVModel,
        hidden: torch.Tensor,
        fused: FusedKV,
        table: RotaryTable,
    ) -> torch.Tensor:
        """Drop what the policy wants computed no longer, and return the inputs of what is left.

        Parameters
        ----------
        layer_index
            The layer that is about to run; its stored KV are in `fused`.
        hidden
            ``[n, hidden]``, its inputs for `rows`.
        """
        count = None if self._counts is None else self._counts[layer_index]
        # No K/V of layer 0 differ: without attention to go by, all go on to where they do.
        may_choose = layer_index > 0 or self._encoded is not None
        if count is not None and may_choose and count < int(self._optional.sum()):
            if self._deviation is None:
                self._deviation = self._compare(layer_index, model, hidden, fused, table)
                self._compared_layer = layer_index
            chosen = self._choose(count, self._deviation)
            self.rows, self._optional, hidden = (
                self.rows[chosen],
                self._optional[chosen],
                hidden[chosen],
            )
            self._deviation = {on: values[chosen] for on, values in self._deviation.items()}
            self.picks.append(self.rows[self._optional])
        else:
            self.picks.append(self.picks[-1] if self.picks else self.rows[self._optional])
        return hidden

    def noting(self, layer_index: int) -> Deviation | None:
        """Return what the layer's forward is to fill in for the next choice; None if there is none.

        The layer of the first choice has been compared already, and holds fresh K/V by now.
        """
        if self._counts is None or self._deviation is None or layer_index == self._compared_layer:
            return None
        coming = self._counts[layer_index + 1 : layer_index + 2]
        if not coming or coming[0] == int(self._optional.sum()):
            return None
        noted = Deviation.empty(len(self.rows), self.rows.device)
        self._deviation = _named(noted)
        return noted

    def _choose(self, count: int, deviation: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the ascending indices into `rows` of fresh rows and of the best candidates."""
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
        """Return how far the candidates are off in a layer yet to run.

        In layer 0 that is what they gather, behind it their stored K/V. Their fresh K/V replace
        the stored ones: they have been computed to be compared.
        """
        if layer_index == 0:
            assert self._encoded is not None
            encoded = replace(self._encoded, starts=self._encoded.starts[self.rows])
            # The fresh rows run along: candidates see them.
            change = model.compare_rows(0, hidden, self.rows, fused, table, encoded=encoded)
            return {"attention": change}
        deviation = Deviation.empty(len(self.rows), self.rows.device)
        which = self._optional.nonzero()[:, 0]
        stored = fused.keys[layer_index][0], fused.values[layer_index][0]
        for block, *fresh in model.project_rows(layer_index, hidden, self.rows, table, which):
            positions = self.rows[block]
            of_block = Deviation.empty(len(block), block.device)
            of_block.note(*(kv[:, positions] for kv in stored), *fresh)
            deviation.keys[block], deviation.values[block] = of_block.keys, of_block.values
            for kv, computed in zip(stored, fresh, strict=True):
                kv.index_copy_(1, positions, computed)
        return _named(deviation)


def _named(deviation: Deviation) -> dict[str, torch.Tensor]:
    return {"k": deviation.keys, "v": deviation.values}
