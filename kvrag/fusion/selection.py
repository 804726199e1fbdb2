"""Which rows of a prompt each layer computes, as the policy narrows them down."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvrag.fusion.policies.base import PromptRows, RecomputePolicy, Seen, highest
from kvrag.kvcache import FusedKV
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

    Attributes
    ----------
    rows
        ``[n]`` ascending positions of the rows of the present layer.
    picks
        For each layer begun so far, the positions of its candidates.
    """

    def __init__(self, policy: RecomputePolicy, prompt: PromptRows, fresh: torch.Tensor) -> None:
        self._policy = policy
        self._prompt = prompt
        candidates = policy.candidates(prompt).to(fresh.device)
        self.rows, order = torch.cat([fresh, candidates]).sort()
        # Which of `rows` the policy may still drop; fresh rows never.
        self._optional = order >= len(fresh)
        self._counts: Sequence[int] | None = policy.counts(prompt) if len(candidates) else None
        # How far stored KV were off in the layer before, for each of `rows`.
        self._deviation: Deviation | None = None
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
        if count is not None and count < self._count_before(layer_index):
            if self._deviation is None:
                self._deviation = self._compare(layer_index, model, hidden, fused, table)
                self._compared_layer = layer_index
            chosen = self._choose(count, self._deviation)
            self.rows, self._optional, hidden = (
                self.rows[chosen],
                self._optional[chosen],
                hidden[chosen],
            )
            self._deviation = self._deviation[chosen]
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
        if layer_index + 1 == len(self._counts):
            return None
        self._deviation = Deviation.empty(len(self.rows), self.rows.device)
        return self._deviation

    def _count_before(self, layer_index: int) -> int:
        assert self._counts is not None
        return self._counts[layer_index - 1] if layer_index else self._counts[0]

    def _choose(self, count: int, deviation: Deviation) -> torch.Tensor:
        """Return the ascending indices into `rows` of fresh rows and of the best candidates."""
        which = self._optional.nonzero()[:, 0]
        seen = Seen(self.rows[which], deviation.keys[which], deviation.values[which])
        kept = highest(self._policy.score(self._prompt, seen), count)
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
    ) -> Deviation:
        """Return how far the stored K/V of the candidates are off in a layer yet to run.

        Their fresh K/V replace the stored ones: they have been computed to be compared.
        """
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
        return deviation
