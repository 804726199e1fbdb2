"""The question's attention to stored KV: how much it gathers from each reused token."""

from __future__ import annotations

from functools import partial

import torch
from torch.linalg import vector_norm

from kvrag.fusion.linked_rows import LinkedRows
from kvrag.fusion.loader import SpanLoader
from kvrag.fusion.slices import Clock, Slices
from kvrag.models.attention import MassObserver, RowMask, num_before
from kvrag.models.cardlayers import RowsAsked
from kvrag.models.kv_model import KVModel
from kvrag.models.rowgraphs import CapturedLayers
from kvrag.models.rows import Attending, RowPass


class QuestionAttention:
    """Attention of the question's tokens to reused tokens, weighted by the values' norms.

    Observes layers of `KVModel.forward_rows`. The relevance of a key is its attention weight times
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

    Attributes
    ----------
    layers
        The observed layers.
    relevance
        ``[M, n]`` float32, on the device of `reused`.
    """

    def __init__(
        self,
        reused: torch.Tensor,
        question_start: int,
        layers: range,
        num_tokens: int | None = None,
    ) -> None:
        self._reused = reused
        self._question_start = question_start
        self.layers = layers
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
) -> Slices[None]:
    """Compute the fresh rows over stored KV up to the last observed layer, noting their attention.

    Afterwards the buffer holds the stored KV of those layers. The fresh tokens' rows after those
    that change have to be computed again. The relevance is that of all ranks' heads.

    Parameters
    ----------
    linked
        Returns the first layer's inputs for rows, and has the adapter that acts on them.
    of
        The pass of the tokens that are not stored.
    clock
        Gets a stage ``"load"``, which fusing needs in any case, and a stage ``"ask"``.
    """
    fresh, compiled = of.rows, of.compiled
    with model.computing_rows(linked.adapter, fresh):
        hidden = linked.embed(fresh)
    captured = compiled if isinstance(compiled, CapturedLayers) else None
    done = 0
    while done < attention.layers.stop:
        layer_index = done
        clock.lap("ask")
        together = range(0)
        if captured is not None:
            together = captured.together(layer_index, fresh, attention.layers)
            if together.stop >= attention.layers.stop:  # the last one ends earlier
                together = range(0)
        layers = together or range(layer_index, layer_index + 1)
        yield from loader.bring(layers, clock)
        done = layers.stop
        with model.computing_rows(linked.adapter, fresh):
            if captured is not None and together:
                asked = attention.asked_of(layer_index, fresh)
                captured.run_together(together, hidden, fresh, of.fused, of.tables, asked)
            else:
                is_last = done == attention.layers.stop
                attending = Attending(attention.observer_of(layer_index), stops=is_last)
                model.forward_rows(layer_index, hidden, of, attending=attending)
        clock.lap("ask")
        yield False
        clock.resume()
    attention.finish()
    attention.relevance = model.ranks.sum(attention.relevance)
