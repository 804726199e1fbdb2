"""The question's look at stored KV: which reused tokens it gathers how much from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from kvrag.fusion.loader import SpanLoader
from kvrag.kvcache import FusedKV
from kvrag.models.attention import RowMask
from kvrag.models.kv_model import KVModel
from kvrag.models.rows import Attending
from kvrag.positions.rotary import RotaryTable


class QuestionAttention:
    """Attention of the question's tokens to reused ones, weighted by the values' norms.

    An observer of `KVModel.forward_rows`: what each question token takes from each key is its
    attention weight times the L2 norm of the key's value, the sum over query heads and question
    tokens. Memory grows with the keys of one head, never with the square of the prompt.

    Parameters
    ----------
    reused
        ``[n]`` ascending positions of reused tokens.
    question_start
        The first position that counts as the question.
    layers
        The layers that are observed.

    Attributes
    ----------
    layers
        As given.
    relevance
        ``[M, n]`` float32, on the device of `reused`.
    """

    def __init__(self, reused: torch.Tensor, question_start: int, layers: range) -> None:
        self._reused = reused
        self._question_start = question_start
        self.layers = layers
        self.relevance = torch.zeros(len(layers), len(reused), device=reused.device)

    def observer_of(self, layer_index: int) -> partial[None] | None:
        """Return the observer of one layer, or None where none is wanted."""
        if layer_index not in self.layers:
            return None
        return partial(self._observe, self.relevance[self.layers.index(layer_index)])

    def _observe(
        self,
        into: torch.Tensor,
        mask: RowMask,
        rows: slice,
        weights: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        asking = int((mask.positions[rows] < self._question_start).sum())
        taken = weights[:, asking:].sum((0, 1)) * value.norm(dim=-1)
        # A sliding window shows the last keys only; what lies before it gives nothing.
        shown = self._reused - mask.first_key
        inside = (shown >= 0) & (shown < len(taken))
        into[inside] += taken[shown[inside]]


def ask(
    model: KVModel,
    embed: Callable[[torch.Tensor], torch.Tensor],
    fresh: torch.Tensor,
    attention: QuestionAttention,
    loader: SpanLoader,
    fused: FusedKV,
    tables: Sequence[RotaryTable],
    lap: Callable[[str], None],
) -> None:
    """Compute the fresh rows over stored KV up to the last observed layer, noting their attention.

    Call inside ``model.computing_rows()``. Stored KV of those layers are in `fused` afterwards;
    rows of fresh tokens hold what has to be computed again.

    Parameters
    ----------
    embed
        Returns the first layer's inputs of positions.
    fresh
        ``[m]`` ascending positions of tokens that are not stored.
    lap
        Books the time since it was last called: ``"load"``, which fusing needs in any case, or
        ``"ask"``.
    """
    hidden = embed(fresh)
    for layer_index in range(attention.layers.stop):
        table = tables[layer_index]
        lap("ask")
        loader.load_layer(layer_index, fused, table)
        lap("load")
        attending = Attending(observer=attention.observer_of(layer_index))
        model.forward_rows(layer_index, hidden, fresh, fused, table, attending=attending)
    lap("ask")
