"""Logits after a fused prompt and some answer tokens, with the full cache or an evicting one."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Protocol

import torch

from kvrag.eviction.base import EvictionPolicy
from kvrag.eviction.cache import EvictingCache
from kvrag.eviction.report import EvictionReport
from kvrag.fusion.evicting import evict_prompt
from kvrag.fusion.fuser import FusedPrompt
from kvrag.models.caches import FusedCache
from kvrag.models.kv_model import KVModel


class Continuation(Protocol):
    """Feeds answers after one prompt; answers may branch off each other."""

    def feed(self, answer: Sequence[int], num_fed: int) -> torch.Tensor:
        """Return the logits ``[n, V]`` after each token of an answer, from `num_fed` on."""
        ...


class FullContinuation:
    """With the full cache: the prompt's own buffer. Use inside ``fused.answering(model)``."""

    def __init__(self, model: KVModel, fused: FusedPrompt) -> None:
        self._model = model
        self._kv = fused.kv

    def feed(self, answer: Sequence[int], num_fed: int) -> torch.Tensor:
        """Return the logits ``[n, V]`` after each token of an answer, from `num_fed` on."""
        cache = FusedCache(self._kv, self._kv.num_tokens + num_fed)
        fed = torch.tensor([list(answer[num_fed:])], device=self._model.device)
        with self._model.lock:
            output = self._model.hf(input_ids=fed, past_key_values=cache, use_cache=True)
        logits: torch.Tensor = output.logits[0]
        return logits


class EvictingContinuation:
    """With the rows that an eviction policy keeps. Use inside ``fused.answering(model)``.

    Evicted rows do not come back: another answer starts again right after the prompt.
    """

    def __init__(self, model: KVModel, fused: FusedPrompt, eviction: EvictionPolicy) -> None:
        self._model = model
        self._prompt = evict_prompt(model, fused, eviction)
        self._begin()

    def _begin(self) -> None:
        self._cache: EvictingCache = copy.deepcopy(self._prompt)
        self._fed: tuple[int, ...] = ()

    def feed(self, answer: Sequence[int], num_fed: int) -> torch.Tensor:
        """Return the logits ``[n, V]`` after each token of an answer, from `num_fed` on."""
        if self._fed != tuple(answer[:num_fed]):
            self._begin()
            if num_fed:
                self._forward(answer[:num_fed])
        return self._forward(answer[num_fed:])

    def _forward(self, token_ids: Sequence[int]) -> torch.Tensor:
        fed = torch.tensor([list(token_ids)], device=self._model.device)
        with self._cache.attending(self._model.hf):
            output = self._model.hf(input_ids=fed, past_key_values=self._cache, use_cache=True)
        self._fed += tuple(token_ids)
        logits: torch.Tensor = output.logits[0]
        return logits

    def report(self) -> EvictionReport:
        """Return which rows the latest answer kept."""
        return self._cache.report()
