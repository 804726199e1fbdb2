"""Logits after a prompt and some answer tokens, with the full cache or an evicting one."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar, Protocol

import torch

from kvrag.eviction import EvictionReport
from kvrag.eviction.base import EvictionPolicy
from kvrag.eviction.cache import EvictingCache
from kvrag.fusion.evicting import evict_prompt
from kvrag.fusion.fuser import FusedPrompt
from kvrag.kvcache import FusedKV
from kvrag.models.caches import FusedCache
from kvrag.models.kv_model import KVModel
from kvrag.models.rows import Attending, RowPass
from kvrag.models.writers import CACHE_ARGUMENT


class Continuation(Protocol):
    """Feeds answers after one prompt; answers may branch off each other.

    Attributes
    ----------
    can_guess
        Whether feeding tokens that the answer then does not take changes nothing, and costs little.
    """

    can_guess: ClassVar[bool]

    def score(self, answers: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Return for each answer the logits ``[n, V]`` after each of its n tokens.

        Afterwards the first answer counts as fed.
        """

    def answering(self) -> AbstractContextManager[None]:
        """Prepare the model for calls of `feed`."""

    def feed(self, answer: Sequence[int], num_fed: int) -> torch.Tensor:
        """Return the logits ``[n, V]`` after each token of an answer, from `num_fed` on."""


class FullContinuation:
    """With the full cache: in the prompt's own buffer, which needs room for what is fed.

    Parameters
    ----------
    model
        The model.
    prompt
        A fused prompt, or the KV of a plain one.
    """

    can_guess: ClassVar[bool] = True

    def __init__(self, model: KVModel, prompt: FusedPrompt | FusedKV) -> None:
        self._model = model
        self._fused = prompt if isinstance(prompt, FusedPrompt) else None
        self._kv = prompt if isinstance(prompt, FusedKV) else prompt.kv

    def score(self, answers: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Return for each answer the logits ``[n, V]`` after each of its n tokens.

        All answers go through the layers at once, as a tree: a beginning that several have is
        computed once, and each token sees the prompt and those before it in its answers.
        """
        model, kv, num_prompt = self._model, self._kv, self._kv.num_tokens
        tree = _Tree(answers)
        fed = torch.tensor(tree.token_ids, dtype=torch.long, device=model.device)
        if not len(fed):
            empty = torch.empty(0, model.hf.config.vocab_size, device=model.device)
            return [empty] * len(answers)
        layout = None if self._fused is None else self._fused.layout
        begin = num_prompt if layout is None else layout.end_position
        positions = [*range(num_prompt)]
        if layout is not None:
            positions = [layout.position(row) for row in positions]
        positions += [begin + depth for depth in tree.depths]
        tables = model.tables(len(positions), positions)
        at = torch.tensor(positions, device=model.device)
        rows = torch.arange(num_prompt, len(positions), device=model.device)
        visible = tree.visible(num_prompt).to(model.device)
        windows: dict[int | None, torch.Tensor] = {None: visible}
        links = None if self._fused is None else self._fused.links
        with model.computing_rows(None if links is None else links.adapter):
            hidden = model.embed(fed, at[rows])
            of = RowPass(rows, kv, tables)
            for layer_index, window in enumerate(model.windows):
                if window is not None and window not in windows:
                    windows[window] = visible & (at > at[rows][:, None] - window)
                attending = Attending(visible=windows[window])
                model.rows.forward(layer_index, hidden, of, attending=attending)
            logits = model.logits(hidden)
        return [logits[nodes] for nodes in tree.nodes]

    def answering(self) -> AbstractContextManager[None]:
        """Prepare the model for calls of `feed`."""
        return nullcontext() if self._fused is None else self._fused.answering(self._model)

    def feed(self, answer: Sequence[int], num_fed: int) -> torch.Tensor:
        """Return the logits ``[n, V]`` after each token of an answer, from `num_fed` on."""
        cache = FusedCache(self._kv, self._kv.num_tokens + num_fed)
        fed = torch.tensor([list(answer[num_fed:])], device=self._model.device)
        with self._model.lock:
            output = self._model.hf(input_ids=fed, **{CACHE_ARGUMENT: cache}, use_cache=True)
        logits: torch.Tensor = output.logits[0]
        return logits


class EvictingContinuation:
    """With the rows that an eviction policy keeps.

    Evicted rows do not come back: another answer starts again right after the prompt.
    """

    can_guess: ClassVar[bool] = False

    def __init__(self, model: KVModel, fused: FusedPrompt, eviction: EvictionPolicy) -> None:
        self._model = model
        self._fused = fused
        with self.answering():
            self._prompt = evict_prompt(model, fused, eviction)
        self._begin()

    def _begin(self) -> None:
        self._cache: EvictingCache = copy.deepcopy(self._prompt)
        self._fed: tuple[int, ...] = ()

    def score(self, answers: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Return for each answer the logits ``[n, V]`` after each of its n tokens."""
        with self.answering():
            # The first one comes last: the greedy answer begins with its tokens.
            return [self.feed(answer, 0) for answer in reversed(answers)][::-1]

    def answering(self) -> AbstractContextManager[None]:
        """Prepare the model for calls of `feed`."""
        return self._fused.answering(self._model)

    def feed(self, answer: Sequence[int], num_fed: int) -> torch.Tensor:
        """Return the logits ``[n, V]`` after each token of an answer, from `num_fed` on."""
        if self._fed != tuple(answer[:num_fed]):
            self._begin()
            if num_fed:
                self._forward(answer[:num_fed])
        return self._forward(answer[num_fed:])

    def _forward(self, token_ids: Sequence[int]) -> torch.Tensor:
        if not token_ids:
            return torch.empty(0, self._model.hf.config.vocab_size, device=self._model.device)
        fed = torch.tensor([list(token_ids)], device=self._model.device)
        with self._cache.attending(self._model.hf):
            output = self._model.hf(input_ids=fed, **{CACHE_ARGUMENT: self._cache}, use_cache=True)
        self._fed += tuple(token_ids)
        logits: torch.Tensor = output.logits[0]
        return logits

    def report(self) -> EvictionReport:
        """Return which rows the latest answer kept."""
        return self._cache.report()


class _Tree:
    """Answers as a tree of tokens, those of the first answer first.

    Attributes
    ----------
    token_ids, depths
        Of each node: its token, and how many tokens precede it in its answers.
    nodes
        For each answer the indices of its tokens.
    """

    def __init__(self, answers: Sequence[Sequence[int]]) -> None:
        places: dict[tuple[int, ...], int] = {}
        self.nodes = [
            [places.setdefault(tuple(answer[: end + 1]), len(places)) for end in range(len(answer))]
            for answer in answers
        ]
        self.token_ids = [beginning[-1] for beginning in places]
        self.depths = [len(beginning) - 1 for beginning in places]

    def visible(self, num_prompt: int) -> torch.Tensor:
        """Return ``[n, N + n]`` bool: which rows of N prompt rows and n nodes each node sees."""
        num_nodes = len(self.token_ids)
        visible = torch.zeros(num_nodes, num_prompt + num_nodes, dtype=torch.bool)
        visible[:, :num_prompt] = True
        for nodes in self.nodes:
            for depth, node in enumerate(nodes):
                visible[node, [num_prompt + seen for seen in nodes[: depth + 1]]] = True
        return visible
