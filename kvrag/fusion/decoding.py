"""Generation behind a prompt whose positions have gaps, row by row in its own buffer.

Transformers numbers what follows a cache by the cache's length, and families with ALiBi take no
positions at all; here new rows continue from the prompt's last position.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvrag.fusion.layout import Layout
from kvrag.kvcache import FusedKV
from kvrag.models.kv_model import KVModel
from kvrag.models.scaling import ScaledKeys


class RowDecoder:
    """Computes one token after the other behind a fused prompt.

    Parameters
    ----------
    model
        The model.
    layout
        The prompt's, with positions.
    fused
        Its buffer, with room behind the prompt: that many tokens can be decoded.
    """

    def __init__(self, model: KVModel, layout: Layout, fused: FusedKV) -> None:
        self._model = model
        self._fused = fused
        self._num_rows = len(layout.token_ids)
        end = layout.end_position
        room = fused.capacity - self._num_rows
        positions = [layout.position(row) for row in range(self._num_rows)]
        positions += range(end, end + room)
        self._positions = torch.tensor(positions, device=model.device)
        self._tables = model.tables(len(positions), positions)

    def step(self, token_id: int, scaled: Sequence[ScaledKeys] = ()) -> torch.Tensor:
        """Write a token's KV; return the logits ``[vocabulary]`` of what follows it.

        Parameters
        ----------
        token_id
            The token.
        scaled
            For each layer the keys that are attended to otherwise; empty: none.
        """
        model = self._model
        row = torch.tensor([self._num_rows], device=model.device)
        with model.computing_rows():
            ids = torch.tensor([token_id], device=model.device)
            hidden = model.embed(ids, self._positions[row])
            for layer_index, table in enumerate(self._tables):
                keys = scaled[layer_index] if scaled else None
                model.forward_rows(layer_index, hidden, row, self._fused, table, scaled=keys)
            logits = model.logits(hidden)[0]
        self._num_rows += 1
        return logits
