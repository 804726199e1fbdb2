"""The rows that each layer computes, when a policy narrows its choice from layer to layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from kvrag.arguments import shown
from kvrag.errors import ParameterError
from kvrag.fusion.policies.base import CandidateStats, PromptRows, RecomputePolicy, highest
from kvrag.models.attention import EncodedScope, host_rows, known_rows, rows_on
from kvrag.models.cardlayers import CardLayers
from kvrag.models.kv_model import KVModel
from kvrag.models.rows import RowPass
from kvrag.models.writers import Deviation


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
    changes_from
        The first row that may change besides candidates, where all layers have been computed for
        the fresh rows already: those before it and before all candidates stay as they are. None:
        all are computed.

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
        changes_from: int | None = None,
    ) -> None:
        self._policy = policy
        self._prompt = prompt
        self._encoded = encoded
        candidates = policy.candidates(prompt)
        candidates = _require_reused(candidates, policy, prompt)
        # All on the host, where a layer asks for the rows' ends: a GPU would be waited for.
        given = host_rows(fresh)
        if changes_from is not None:
            given = given[given >= min([changes_from, *candidates[:1].tolist()])]
            fresh = rows_on(fresh.device, given)
        num_fresh = len(given)
        # Which of `rows` stay, and which the policy may still drop.
        self.rows = fresh
        self._fresh = self._optional = fresh[:0]  # without candidates, nothing is looked up
        # The last row, if it stays.
        self._last = int(given[-1]) if num_fresh else None
        if len(candidates):
            rows, order = torch.cat([given, candidates]).sort()
            self.rows = rows_on(fresh.device, rows)
            places = torch.empty_like(order)
            places[order] = torch.arange(len(order))
            places = places.to(fresh.device)
            self._fresh, self._optional = places[:num_fresh], places[num_fresh:].sort().values
            if int(order[-1]) >= num_fresh:
                self._last = None
        self._counts: Sequence[int] | None = policy.counts(prompt) if len(candidates) else None
        # The deviation of stored KV when they were last compared: for each candidate, or noted by
        # a layer for each of `rows`.
        self._deviation: dict[str, torch.Tensor] | None = None
        self._noted: Deviation | None = None
        self._compared_layer: int | None = None
        self.picks: list[torch.Tensor] = []
        self.num_compared = 0

    def enter(
        self,
        layer_index: int,
        model: KVModel,
        hidden: torch.Tensor,
        of: RowPass,
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
        of
            The pass of `rows`, whose buffer holds the layer's stored KV.
        """
        count = None if self._counts is None else self._counts[layer_index]
        # K/V of layer 0 never differ: without attention to compare, the choice waits for layer 1.
        may_choose = layer_index > 0 or self._encoded is not None
        if count is not None and may_choose and count < len(self._optional):
            if self._noted is not None:
                noted = self._noted[self._optional]
                self._deviation = {"k": noted.keys, "v": noted.values}
                self._noted = None
            elif self._deviation is None:
                self._deviation = self._compare(layer_index, model, hidden, of)
                self._compared_layer = layer_index
            # Each rank knows its own heads' part of a distance; not kept, as it may serve twice.
            whole = {on: model.ranks.sum(far.clone()) for on, far in self._deviation.items()}
            stats = CandidateStats(self.rows[self._optional], whole)
            kept = highest(self._policy.score(self._prompt, stats), count)
            self._deviation = {on: values[kept] for on, values in self._deviation.items()}
            wanted = self._optional[kept]
            chosen = torch.cat([self._fresh, wanted]).sort().values
            self._fresh = torch.searchsorted(chosen, self._fresh)
            self._optional = torch.searchsorted(chosen, wanted)
            self.rows, hidden = self.rows[chosen], hidden[chosen]
            known_rows(self.rows).last = self._last
            self.picks.append(self.rows[self._optional])
        else:
            self.picks.append(self.picks[-1] if self.picks else self.rows[self._optional])
        return hidden

    def stays(self, layers: range) -> bool:
        """Return whether layers compute the present rows, and need not be compared."""
        if self._counts is None or not layers:
            return True
        # The layer after them too: if it drops rows, these layers' deviation has to be noted.
        seen = layers.stop + (self._deviation is not None)
        return all(one >= len(self._optional) for one in self._counts[layers.start : seen])

    def noting(self, layer_index: int) -> Deviation | None:
        """Return the deviation that the layer's forward has to fill in; None if none is needed.

        The layer of the first choice has already been compared, and its K/V are now fresh.
        """
        if self._counts is None or self._deviation is None or layer_index == self._compared_layer:
            return None
        coming = self._counts[layer_index + 1 : layer_index + 2]
        if not coming or coming[0] == len(self._optional):
            return None
        self._noted = Deviation.empty(len(self.rows), self.rows.device)
        return self._noted

    def _compare(
        self,
        layer_index: int,
        model: KVModel,
        hidden: torch.Tensor,
        of: RowPass,
    ) -> dict[str, torch.Tensor]:
        """Return the candidates' deviation in a layer that has not run yet.

        Layer 0 compares their attention outputs; later layers compare their stored K/V with fresh
        K/V, which then replace the stored ones.
        """
        if layer_index == 0:
            assert self._encoded is not None
            encoded = replace(self._encoded, starts=self._encoded.starts[self.rows])
            # Includes the fresh rows, because candidates see them.
            change = model.compare_rows(0, hidden, of, encoded=encoded)
            self.num_compared = len(self.rows)
            return {"attention": change[self._optional]}
        which, self.num_compared = self._optional, len(self._optional)
        deviation = Deviation.empty(len(which), self.rows.device)
        stored = of.fused.keys[layer_index][0], of.fused.values[layer_index][0]
        if isinstance(of.compiled, CardLayers):
            # As one block: on a card, operations cost more than their memory.
            positions = self.rows[which]
            before = [kv[:, positions] for kv in stored]
            model.write_rows(layer_index, hidden, of)
            deviation.note(*before, *(kv[:, positions] for kv in stored))
        else:
            done = 0
            for block, *fresh in model.project_rows(layer_index, hidden, of, which):
                positions = self.rows[block]
                of_block = deviation[done : done + len(block)]
                of_block.note(*(kv[:, positions] for kv in stored), *fresh)
                done += len(block)
                for kv, computed in zip(stored, fresh, strict=True):
                    kv.index_copy_(1, positions, computed)
        return {"k": deviation.keys, "v": deviation.values}


def _require_reused(
    candidates: torch.Tensor, policy: RecomputePolicy, prompt: PromptRows
) -> torch.Tensor:
    """Return candidates, on the host; ParameterError unless they are distinct reused positions."""
    here = candidates.cpu()
    if here.dtype == torch.long and here.shape == (0,):
        return here
    if (
        here.dtype.is_floating_point
        or here.dtype == torch.bool
        or here.dim() != 1
        or not torch.isin(here, prompt.reused()).all()
        or (here.sort().values.diff() == 0).any()
    ):
        raise ParameterError(
            f"policy {policy}: expected candidates that are positions of reused tokens, each once; "
            f"found {shown(candidates.tolist())}; mend the policy (kvrag_testing)"
        )
    return here
