"""Generation after a fused prompt, token by token in the prompt's buffer."""

from __future__ import annotations

from typing import Protocol

import torch

from kvrag.eviction.base import EvictionPolicy
from kvrag.eviction.report import EvictionReport
from kvrag.fusion.evicting import EvictingDecoder
from kvrag.fusion.fuser import FusedPrompt
from kvrag.models.caches import CACHE_ARGUMENT, FusedCache
from kvrag.models.kv_model import KVModel
from kvrag.models.rows import Attending


class Decoder(Protocol):
    """Computes the tokens after a fused prompt, one at a time."""

    def step(self, token_id: int) -> torch.Tensor:
        """Write a token's KV; return the logits ``[vocabulary]`` of what follows it."""
        ...

    def report(self) -> EvictionReport | None:
        """Return what was evicted so far; None if the decoder evicts nothing."""
        ...


def make_decoder(model: KVModel, fused: FusedPrompt, eviction: EvictionPolicy | None) -> Decoder:
    """Return the decoder that continues a prompt.

    Raises
    ------
    ParameterError, UnsupportedModelError
        See `EvictingDecoder`.
    """
    if eviction is not None:
        return EvictingDecoder(model, fused, eviction)
    has_kernel = model.device.type == "cpu" and not model.family.attends_itself
    if fused.layout.positions is not None or has_kernel:
        return RowDecoder(model, fused)
    return CacheDecoder(model, fused)


class CacheDecoder:
    """Continues a prompt without gaps in its positions, by means of Transformers.

    Parameters
    ----------
    model
        The model.
    fused
        The prompt.
    """

    def __init__(self, model: KVModel, fused: FusedPrompt) -> None:
        self._model = model
        self._fused = fused
        self._cache = FusedCache(fused.kv, fused.kv.num_tokens)

    def step(self, token_id: int) -> torch.Tensor:
        """Write a token's KV; return the logits ``[vocabulary]`` of what follows it."""
        model = self._model
        with self._fused.answering(model), torch.no_grad():
            ids = torch.tensor([[token_id]], device=model.device)
            output = model.hf(input_ids=ids, **{CACHE_ARGUMENT: self._cache}, use_cache=True)
        logits: torch.Tensor = output.logits[0, -1]
        return logits

    def report(self) -> None:
        """Return None: every key is kept."""


class RowDecoder:
    """Continues a prompt row by row, as the fuser computes rows: on the CPU, in compiled kernels.

    It also continues prompts whose positions have gaps. Transformers derives the positions after a
    cache from the cache's length, and families with ALiBi take no positions at all. Here, new rows
    continue from the prompt's last position.

    Parameters
    ----------
    model
        The model.
    fused
        The prompt. The room left in its buffer limits how many tokens can be decoded.
    """

    def __init__(self, model: KVModel, fused: FusedPrompt) -> None:
        layout = fused.layout
        self._model = model
        self._fused = fused.kv
        self._scaled = fused.scaled
        self._adapter = None if fused.links is None else fused.links.adapter
        self._num_rows = len(layout.token_ids)
        end = layout.end_position
        room = fused.kv.capacity - self._num_rows
        positions = [layout.position(row) for row in range(self._num_rows)]
        positions += range(end, end + room)
        self._positions = torch.tensor(positions, device=model.device)
        self._tables = model.tables(len(positions), positions)

    def step(self, token_id: int) -> torch.Tensor:
        """Write a token's KV; return the logits ``[vocabulary]`` of what follows it."""
        model = self._model
        row = torch.tensor([self._num_rows], device=model.device)
        with model.computing_rows(self._adapter):
            ids = torch.tensor([token_id], device=model.device)
            hidden = model.embed(ids, self._positions[row])
            for layer_index, table in enumerate(self._tables):
                keys = self._scaled[layer_index] if self._scaled else None
                attending = Attending(scaled=keys)
                model.forward_rows(
                    layer_index, hidden, row, self._fused, table, attending=attending
                )
            logits = model.logits(hidden)[0]
        self._num_rows += 1
        return logits

    def report(self) -> None:
        """Return None: every key is kept."""
