"""The rows that each layer computes, when a policy narrows its choice from layer to layer.

Before the first layer, a policy may look at what the question attends to (`QuestionAttention`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch.linalg import vector_norm

from kvrag.arguments import shown
from kvrag.errors import ParameterError
from kvrag.fusion.linked_rows import LinkedRows
from kvrag.fusion.loader import SpanLoader
from kvrag.fusion.policies.base import CandidateStats, PromptRows, RecomputePolicy, highest
from kvrag.fusion.slices import Clock, Slices, joined
from kvrag.models.attention import (
    MassObserver,
    RowMask,
    host_rows,
    known_rows,
    num_before,
    rows_on,
)
from kvrag.models.batched_prefill import share_of
from kvrag.models.cardlayers import CardLayers, RowsAsked
from kvrag.models.kv_model import KVModel
from kvrag.models.rowgraphs import CapturedLayers
from kvrag.models.rows import Attending, RowPass
from kvrag.models.writers import Deviation


@dataclass(frozen=True)
class Joining:
    """Fresh rows that are computed from a layer on, whose inputs the look has left.

    Attributes
    ----------
    layer_index
        The layer; none has the model's number of layers.
    rows
        ``[n]`` ascending positions.
    hidden
        ``[n, hidden]``: the layer's inputs.
    """

    layer_index: int
    rows: torch.Tensor
    hidden: torch.Tensor


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
    changes_from
        The first row that may change besides candidates, where all layers have been computed for
        the fresh rows already: those before it and before all candidates stay as they are. None:
        all are computed.
    joining
        From which layer on parts of the fresh rows are computed, if not all from the first.

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
        changes_from: int | None = None,
        joining: Sequence[Joining] = (),
    ) -> None:
        self._policy = policy
        self._prompt = prompt
        candidates = policy.candidates(prompt)
        candidates = _require_reused(candidates, policy, prompt)
        # Without candidates, all are computed from the first layer on.
        self._joining = joining if len(candidates) else ()
        if self._joining:
            fresh = next((one.rows for one in joining if one.layer_index == 0), fresh[:0])
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
        # K/V of layer 0 never differ: the choice waits for layer 1.
        if count is not None and layer_index and count < len(self._optional):
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
        for one in self._joining:
            if layer_index and one.layer_index == layer_index:
                hidden = self._join(one, hidden)
        return hidden

    def _join(self, joining: Joining, hidden: torch.Tensor) -> torch.Tensor:
        """Add rows, and return the inputs of all."""
        num_rows, device = len(self.rows), hidden.device
        rows, order = torch.cat([host_rows(self.rows), host_rows(joining.rows)]).sort()
        places = order.argsort().to(device)
        self.rows = rows_on(device, rows)
        self._fresh = torch.cat([places[self._fresh], places[num_rows:]])
        self._optional = places[self._optional]
        if len(order) and int(order[-1]) >= num_rows:
            self._last = int(rows[-1])
        return torch.cat([hidden, joining.hidden])[order.to(device)]

    def stays(self, layers: range) -> bool:
        """Return whether layers compute the present rows, and need not be compared."""
        if any(one.layer_index in layers[1:] for one in self._joining):
            return False
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
        """Return the deviation of the candidates' stored K/V in a layer that has not run yet.

        Fresh K/V then replace the stored ones.
        """
        which, self.num_compared = self._optional, len(self._optional)
        deviation = Deviation.empty(len(which), self.rows.device)
        stored = of.fused.keys[layer_index][0], of.fused.values[layer_index][0]
        if isinstance(of.compiled, CardLayers):
            # As one block: on a card, operations cost more than their memory.
            positions = self.rows[which]
            before = [kv[:, positions] for kv in stored]
            model.rows.write(layer_index, hidden, of)
            deviation.note(*before, *(kv[:, positions] for kv in stored))
        else:
            done = 0
            for block, *fresh in model.rows.project(layer_index, hidden, of, which):
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
        or not np.isin(here.numpy(), prompt.reused().numpy()).all()
        or len(np.unique(here.numpy())) < len(here)
    ):
        raise ParameterError(
            f"policy {policy}: expected candidates that are positions of reused tokens, each once; "
            f"found {shown(candidates.tolist())}; mend the policy (kvrag_testing)"
        )
    return here


class QuestionAttention:
    """Attention of the question's tokens to reused tokens, weighted by the values' norms.

    Observes layers of `RowRunner.forward`. The relevance of a key is its attention weight times
    the L2 norm of its value, summed over query heads and question tokens. Memory grows linearly
    with the prompt.

    Parameters
    ----------
    reused
        ``[n]`` ascending positions of reused tokens.
    question_start
        The first position that counts as the question.
    layers
        The layers to observe.
    num_tokens
        The prompt's tokens, for kernels of a card that note attention themselves; None: they do
        not. `finish` then completes the relevance.
    kept
        A layer before the last of them.

    Attributes
    ----------
    layers, kept
        The observed layers; the one whose inputs `ask` leaves.
    relevance
        ``[M, n]`` float32, on the device of `reused`.
    """

    def __init__(
        self,
        reused: torch.Tensor,
        question_start: int,
        layers: range,
        num_tokens: int | None = None,
        kept: int = 0,
    ) -> None:
        self._reused = reused
        self._question_start = question_start
        self.layers = layers
        self.kept = kept
        # Which of the reused tokens lie among a layer's keys, by the first key and their number.
        self._shown: dict[tuple[int, int], tuple[int, int]] = {}
        shape = (len(layers), len(reused))
        self.relevance = torch.zeros(shape, dtype=torch.float32, device=reused.device)
        self._taken = None
        if num_tokens is not None:
            self._taken = torch.zeros(len(layers), num_tokens, device=reused.device)

    def observer_of(self, layer_index: int) -> MassObserver | None:
        """Return the observer of one layer, or None if the layer is not observed."""
        if layer_index not in self.layers:
            return None
        into = self.relevance[self.layers.index(layer_index)]
        taken = None if self._taken is None else (self._taken, self.layers.start)
        return MassObserver(self._question_start, partial(self._note, into), taken)

    def asked_of(self, layer_index: int, rows: torch.Tensor) -> RowsAsked | None:
        """Return what kernels of a card note of a layer; None if it is not observed."""
        if layer_index not in self.layers or self._taken is None:
            return None
        first = num_before(rows, self._question_start)
        return RowsAsked(self._taken, self.layers.start, first)

    def finish(self) -> None:
        """Add what kernels of a card noted; call it once all layers have run."""
        if self._taken is not None:
            self.relevance += self._taken[:, self._reused]

    def _note(
        self, into: torch.Tensor, mask: RowMask, mass: torch.Tensor, value: torch.Tensor
    ) -> None:
        taken = (mass * vector_norm(value, dim=-1, dtype=torch.float32)).sum(0)
        # A sliding window shows only the last keys; earlier keys get no attention.
        key = mask.first_key, mask.first_key + len(taken)
        if key not in self._shown:
            ends = torch.searchsorted(self._reused, torch.tensor(key, device=into.device))
            first, end = ends.tolist()
            self._shown[key] = first, end
        first, end = self._shown[key]
        into[first:end] += taken[self._reused[first:end] - mask.first_key]


def ask(
    model: KVModel,
    linked: LinkedRows,
    attention: QuestionAttention,
    loader: SpanLoader,
    of: RowPass,
    clock: Clock,
) -> Slices[tuple[torch.Tensor, torch.Tensor]]:
    """Compute the fresh rows over stored KV up to the last observed layer, noting their attention.

    Afterwards the buffer holds the stored KV of those layers. The relevance is that of all ranks'
    heads.

    Parameters
    ----------
    linked
        Returns the first layer's inputs for rows, and has the adapter that acts on them.
    of
        The pass of the tokens that are not stored.
    clock
        Gets a stage ``"load"``, which fusing needs in any case, and a stage ``"ask"``.

    Returns
    -------
    tensor, tensor
        The rows' inputs of the layer `attention.kept`, and of the one after the observed ones, if
        the model computes that.
    """
    fresh, compiled = of.rows, of.compiled
    computing = partial(model.computing_rows, linked.adapter, fresh)
    with computing():
        hidden = linked.embed(fresh)
    captured = compiled if isinstance(compiled, CapturedLayers) else None
    done, early = 0, hidden
    while done < attention.layers.stop:
        layer_index = done
        if done == attention.kept:
            early = hidden.clone()
        clock.lap("ask")
        together = range(0)
        if captured is not None:
            together = captured.together(layer_index, fresh, attention.layers)
            # The last one may end earlier.
            if together.stop >= attention.layers.stop or attention.kept in together[1:]:
                together = range(0)
        layers = together or range(layer_index, layer_index + 1)
        yield from loader.bring(layers, clock)
        done = layers.stop
        is_last = done == attention.layers.stop >= model.layer_stop
        asked = attention.asked_of(layer_index, fresh)
        if captured is not None and together:
            given = together, hidden, fresh, of.fused, of.tables, asked
            run_alone = partial(captured.run_together, *given)
        else:
            attending = Attending(attention.observer_of(layer_index), stops=is_last)
            run_alone = partial(model.rows.forward, layer_index, hidden, of, attending=attending)
        share = None
        if not is_last:
            share = share_of(model, layers, hidden, of, asked, is_captured=bool(together))
        if share is not None:
            yield from joined(share, computing, run_alone, clock, "ask")
            continue
        with computing():
            run_alone()
        clock.lap("ask")
        yield False
        clock.resume()
    attention.finish()
    attention.relevance = model.ranks.sum(attention.relevance)
    return early, hidden
