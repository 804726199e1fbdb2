"""Generation after a fused prompt from a cache that evicts keys.

Eviction policies need queries to see which keys matter, and stored chunks have none. So the last
tokens of the prompt are computed once more, layer by layer, over the fused keys and values, which
this does not change. If everything was recomputed, these are the queries of a full prefill.
"""

from __future__ import annotations

from typing import Any

import torch

from kvrag.eviction import EvictionReport
from kvrag.eviction.base import EvictionPolicy, HeldKeys
from kvrag.eviction.cache import EvictingCache
from kvrag.fusion.fuser import FusedPrompt
from kvrag.fusion.linked_rows import LinkedRows
from kvrag.models.attention import RowMask
from kvrag.models.kv_model import KVModel
from kvrag.models.rows import Attending, RowPass
from kvrag.models.writers import CACHE_ARGUMENT


def evict_prompt(model: KVModel, fused: FusedPrompt, policy: str | EvictionPolicy) -> EvictingCache:
    """Return a cache with the keys and values of a fused prompt that a policy keeps.

    Each row of the buffer counts as a token, including link tokens, which give no queries. The
    buffer does not change.

    Raises
    ------
    ParameterError
        As `make_eviction` does.
    UnsupportedModelError
        See `EvictingCache`.
    """
    cache = EvictingCache(model.hf, policy)
    layout, kv = fused.layout, fused.kv
    num_rows = len(layout.token_ids)
    linked = LinkedRows(model, layout, fused.links)
    tokens = [row for row, token_id in enumerate(layout.token_ids) if token_id >= 0]
    last = tokens[max(0, len(tokens) - cache.policy.num_queries) :]
    asking = torch.tensor(last, dtype=torch.long, device=model.device)
    everything = torch.ones(1, num_rows, dtype=torch.bool, device=model.device)
    layers: list[Any] = cache.layers
    with model.computing_rows(linked.adapter, fused.fresh):
        hidden = linked.embed(asking)
        tables = model.tables(num_rows, layout.positions) if len(asking) else []
        of = RowPass(asking, kv, tables)
        for layer_index, layer in enumerate(layers):
            held = HeldKeys.of_prompts(everything, model.spec.num_kv_heads)
            if len(asking):
                observer = _Observer(cache.policy, held)
                attending = Attending(observer=observer)
                model.rows.forward(layer_index, hidden, of, attending=attending, writes=False)
            rows = (part[layer_index][:, :, :num_rows] for part in (kv.keys, kv.values))
            layer.keep(held, *rows)
    cache.besides(kv.storage.numel() * kv.storage.element_size())
    return cache


class _Observer:
    """Passes the rows' attention weights in a layer to a policy.

    Key heads come in order, and each with all rows of a block.
    """

    def __init__(self, policy: EvictionPolicy, held: HeldKeys) -> None:
        self._policy, self._held = policy, held
        self._head = -1

    def __call__(
        self,
        mask: RowMask,
        rows: slice,
        weights: torch.Tensor,
        value: torch.Tensor,  # noqa: ARG002
    ) -> None:
        if rows.start == 0:
            self._head = (self._head + 1) % len(self._held.places)
        num_keys = weights.shape[-1]
        visible = mask.dense(num_keys)[rows].sum(-1)
        shown = slice(mask.first_key, mask.first_key + num_keys)
        head = self._held.part(slice(self._head, self._head + 1), shown)
        self._policy.observe(head, weights[None], visible)


class EvictingDecoder:
    """Computes the tokens after a fused prompt, one at a time, and evicts keys as a policy says.

    Parameters
    ----------
    model
        The model.
    fused
        The prompt; the decoder releases its buffer.
    policy
        Chooses the keys to evict.

    Attributes
    ----------
    cache
        The keys and values that remain.

    Raises
    ------
    ParameterError, UnsupportedModelError
        See `evict_prompt`.
    """

    def __init__(self, model: KVModel, fused: FusedPrompt, policy: str | EvictionPolicy) -> None:
        self.cache = evict_prompt(model, fused, policy)
        fused.kv.release()
        self._model = model
        self._fused = fused
        self._position = fused.layout.end_position

    def step(self, token_id: int) -> torch.Tensor:
        """Write a token's KV; return the logits ``[vocabulary]`` of what follows it."""
        model = self._model
        with self._fused.answering(model), self.cache.attending(model.hf), torch.no_grad():
            output = model.hf(
                input_ids=torch.tensor([[token_id]], device=model.device),
                # The prompt's positions may have gaps.
                position_ids=torch.tensor([[self._position]], device=model.device),
                **{CACHE_ARGUMENT: self.cache},
                use_cache=True,
            )
        self._position += 1
        logits: torch.Tensor = output.logits[0, -1]
        return logits

    def report(self) -> EvictionReport:
        """Return what was kept so far."""
        return self.cache.report()
