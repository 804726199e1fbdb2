"""A Transformers cache that applies a policy behind the prompt and at every step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from kvrag.errors import ParameterError, UnsupportedModelError
from kvrag.eviction.attention import (
    Score,
    attend_ragged,
    evicting_attention,
    hand_on,
    is_serving,
    observed_queries,
)
from kvrag.eviction.base import EvictionPolicy, HeldKeys
from kvrag.eviction.ragged import RaggedKV
from kvrag.eviction.registry import make_eviction
from kvrag.eviction.report import EvictionReport
from kvrag.models.attention import lock_of
from kvrag.models.families import find_family, num_kv_heads, sliding_windows


class _Memory:
    """Bytes of keys and values, layer by layer, and the most that there were at a time."""

    def __init__(self, num_layers: int) -> None:
        self._layers = [0] * num_layers
        self.peak = 0

    @property
    def size(self) -> int:
        return sum(self._layers)

    def note(self, layer_index: int, num_bytes: int, besides: int = 0) -> None:
        """Note a layer's bytes, and what was there `besides` while they were moved."""
        self._layers[layer_index] = num_bytes
        self.peak = max(self.peak, self.size + besides)

    def forget(self, layer_index: int) -> None:
        """Begin again with a layer; without any layer, the most is forgotten as well."""
        self._layers[layer_index] = 0
        if not self.size:
            self.peak = 0


class EvictingLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer: the prompt's keys and values are taken once, then tokens one after another.

    Prompts come either through attention (`take_prompt`), or by hand: `begin`, `observe` for the
    queries that the policy asks for, in order, and `keep`.
    """

    is_sliding = False

    def __init__(
        self, policy: EvictionPolicy, window: int | None, layer_index: int, memory: _Memory
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._policy = policy
        self._window = window
        self._layer_index = layer_index
        self._memory = memory
        self._prompt: HeldKeys | None = None
        self._num_rows = 0
        self.kv: RaggedKV | None = None
        self.prompt_share = 1.0
        self.is_initialized = True

    @property
    def is_empty(self) -> bool:
        """Whether the prompt is yet to come."""
        return self.kv is None

    # -- the prompt ---------------------------------------------------------------------------

    def begin(self, real: torch.Tensor, num_kv_heads: int) -> None:
        """Prepare for prompts whose rows are tokens where ``real`` ``[B, N]`` says so."""
        self._num_rows = real.shape[1]
        held = real.repeat_interleave(num_kv_heads, dim=0)
        num_tokens = held.sum(1, keepdim=True)
        self._prompt = HeldKeys(
            places=held.cumsum(1) - 1,
            held=held,
            marks=torch.zeros(held.shape, device=real.device),
            num_seen=num_tokens,
            num_prompt=num_tokens,
            num_noted=torch.zeros_like(num_tokens),
        )

    def observe(
        self, heads: slice, rows: slice, weights: torch.Tensor, num_visible: torch.Tensor
    ) -> None:
        """Show the policy what some queries of some heads attend to, ``[A, G, q, K]``.

        Parameters
        ----------
        rows
            The K rows of the prompt that the weights are over.
        num_visible
            ``[q]``: how many keys each query sees.
        """
        assert self._prompt is not None
        keys = self._prompt.part(heads, rows)
        self._policy.note(keys, weights, num_visible.expand(len(weights), -1))
        keys.num_noted.add_(weights.shape[2])

    def keep(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Take what the policy leaves of keys and values ``[B, H, N, D]``."""
        prompt, self._prompt = self._prompt, None
        assert prompt is not None
        gone = self._policy.after_prompt(prompt)
        if gone is not None:
            prompt.held.logical_and_(~gone)
        if self._window is not None:
            # What the next token sees; those before it are seen by nobody any more.
            prompt.held.logical_and_(prompt.is_recent(self._window - 1))
        self.kv = RaggedKV(keys, values, prompt)
        self.prompt_share = sum(self.kv.counts) / int(prompt.num_prompt.sum())
        whole = 2 * keys.numel() * keys.element_size()
        self._memory.note(self._layer_index, self.kv.size_bytes, besides=whole)

    @torch.no_grad()
    def take_prompt(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        allowed: torch.Tensor | None,
        score: Score,
    ) -> None:
        """Keep what the policy leaves of prompts, after a look at what their last queries do.

        Parameters
        ----------
        query, key, value
            ``[B, G * H, N, D]`` and ``[B, H, N, D]``.
        allowed
            ``[B or 1, N, N]`` bool: which row sees which; None: all before it.
        """
        num_prompts, num_kv_heads, num_rows, _ = key.shape
        device = key.device
        real = torch.ones(num_prompts, num_rows, dtype=torch.bool, device=device)
        if allowed is not None:
            # Whoever does not see itself is padding.
            real &= allowed.diagonal(dim1=1, dim2=2)
        self.begin(real, num_kv_heads)
        for prompt in range(num_prompts) if self._policy.num_queries else ():
            asking = real[prompt].nonzero()[-self._policy.num_queries :, 0]
            if allowed is None:
                visible = torch.arange(num_rows, device=device) <= asking[:, None]
            else:
                visible = allowed[min(prompt, len(allowed) - 1), asking]
            heads = slice(prompt * num_kv_heads, (prompt + 1) * num_kv_heads)
            for weights, num_visible in observed_queries(
                query[prompt, :, asking], key[prompt], visible, score
            ):
                self.observe(heads, slice(num_rows), weights, num_visible)
        self.keep(key, value)

    # -- what follows it ----------------------------------------------------------------------

    @torch.no_grad()
    def step(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        allowed: torch.Tensor | None,
        score: Score,
    ) -> torch.Tensor:
        """Add n tokens one after another, evicting behind each.

        Parameters
        ----------
        query, key, value
            ``[B, G * H, n, D]`` and ``[B, H, n, D]``.
        allowed
            ``[B or 1, n, N]`` bool, over all rows there ever were; None: all before each.

        Returns
        -------
        tensor
            ``[B, n, G * H, D]``.

        Raises
        ------
        ParameterError
            For another batch, or one with padding behind its prompts' first tokens.
        """
        assert self.kv is not None
        num_prompts, num_kv_heads, num_new, head_dim = key.shape
        num_heads = num_prompts * num_kv_heads
        if num_heads != len(self.kv.counts):
            raise ParameterError(
                f"an evicting cache of {len(self.kv.counts) // num_kv_heads} prompts was given "
                f"{num_prompts}: begin a new cache for another batch"
            )
        if allowed is not None:
            self._check_padding(allowed, num_prompts, num_new)
        output = query.new_empty(num_prompts, num_new, query.shape[1], head_dim)
        for new in range(num_new):
            of_heads = query[:, :, new].reshape(num_heads, -1, head_dim)
            self.append(
                key[:, :, new].reshape(num_heads, -1), value[:, :, new].reshape(num_heads, -1)
            )
            taken, weights = attend_ragged(of_heads, self.kv, score)
            output[:, new] = taken.view(num_prompts, -1, head_dim)
            self.evict(weights)
        self._num_rows += num_new
        return output

    def _check_padding(self, allowed: torch.Tensor, num_prompts: int, num_new: int) -> None:
        """Raise ParameterError where the last row does not see all that its prompt has."""
        assert self.kv is not None
        expected = self.kv.notes.num_seen[:: len(self.kv.counts) // num_prompts, 0] + num_new
        if self._window is not None:
            expected = expected.clamp(max=self._window)
        if not bool((allowed[:, -1].sum(-1) == expected).all()):
            raise ParameterError(
                "padding behind the prompts of an evicting cache, where each row is a token: go "
                "on with as many tokens for each prompt, or with a cache for each"
            )

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Add one token to each head, ``[A, D]``."""
        assert self.kv is not None
        before = self.kv.size_bytes
        if self.kv.append(keys, values):
            self._memory.note(self._layer_index, self.kv.size_bytes, besides=before)

    def evict(self, weights: torch.Tensor) -> None:
        """Forget what the policy does not want behind a token that attended so, ``[A, G, k]``."""
        assert self.kv is not None
        keys = self.kv.notes.first(weights.shape[2])
        self._policy.note(keys, weights[:, :, None], self.kv.num_held)
        keys.num_noted.add_(1)
        gone = self._policy.after_step(keys)
        if self._window is not None:
            passed = keys.held & ~keys.is_recent(self._window - 1)
            gone = passed if gone is None else gone | passed
        if gone is None:
            return
        before = self.kv.size_bytes
        if self.kv.remove(gone):
            self._memory.note(self._layer_index, self.kv.size_bytes, besides=before)

    def there(self) -> RaggedKV:
        """Return what is held. Raises ParameterError before there is a prompt."""
        if self.kv is None:
            raise ParameterError(
                "an evicting cache without a prompt has nothing to tell of: call the model first"
            )
        return self.kv

    def kept(self) -> list[torch.Tensor]:
        """Return for each head, prompt by prompt, which of its tokens it holds, ascending."""
        notes = self.there().notes
        return [
            places[held].sort().values
            for places, held in zip(notes.places, notes.held, strict=True)
        ]

    # -- what Transformers asks of a layer ------------------------------------------------------

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not is_serving():
            raise ParameterError(
                "an evicting cache was used outside of its attention, which alone knows what is "
                "left: call the model inside 'with cache.attending(model):'"
            )
        hand_on(self, key_states)
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._num_rows + query_length, 0

    def get_seq_length(self) -> int:
        return self._num_rows

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        """Forget everything."""
        self._prompt = self.kv = None
        self._num_rows = 0
        self.prompt_share = 1.0
        self._memory.forget(self._layer_index)

    def crop(self, *args: Any, **kwargs: Any) -> None:
        raise ParameterError(
            "an evicting cache takes no tokens back, what they made it forget is gone: generate "
            "without an assistant and without prompt lookup"
        )

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        raise ParameterError("an evicting cache knows no beams: generate with num_beams=1")


def check_evictable(model: PreTrainedModel) -> None:
    """Raise UnsupportedModelError for a model whose attention cannot go without some keys."""
    if find_family(model).attends_itself:
        raise UnsupportedModelError(
            f"model type {model.config.model_type!r} attends in code of its own, which knows no "
            "heads of different lengths; leave eviction out"
        )


class EvictingCache(Cache):
    """A Transformers cache that forgets keys as a policy says.

    ``with cache.attending(model): model.generate(..., past_key_values=cache)``, for one prompt or
    a batch padded on the left. Positions stay those of the whole text: keys keep the places that
    they were rotated to, and the cache counts what it has forgotten. Each head has keys of its
    own; what goes leaves memory. Deep copies are independent.

    Parameters
    ----------
    model
        The model that will use it, of a supported family.
    policy
        An `EvictionPolicy`, or its name with parameters (`make_eviction`).

    Raises
    ------
    UnsupportedModelError
        Of models that attend in code of their own (BLOOM, MPT, Falcon).
    ParameterError
        For an unknown policy, or ``"none"``: the full cache is another cache.
    """

    def __init__(self, model: PreTrainedModel, policy: str | EvictionPolicy) -> None:
        check_evictable(model)
        made = make_eviction(policy)
        if made is None:
            raise ParameterError("eviction 'none' is no eviction: use another cache")
        self.policy = made
        self._num_kv_heads = num_kv_heads(model.config)
        windows = sliding_windows(model)
        self._memory = _Memory(len(windows))
        layers: list[Any] = [
            EvictingLayer(made, window, layer_index, self._memory)
            for layer_index, window in enumerate(windows)
        ]
        super().__init__(layers=layers)

    @contextmanager
    def attending(self, model: PreTrainedModel) -> Iterator[None]:
        """Let forwards of the model, in this thread, use evicting caches; holds its lock."""
        with lock_of(model), evicting_attention(model):
            yield

    def besides(self, num_bytes: int) -> None:
        """Count memory that stood beside the cache until now, such as a prompt's buffer."""
        self._memory.peak = max(self._memory.peak, self._memory.size + num_bytes)

    def kept(self, layer_index: int) -> list[torch.Tensor]:
        """Return for each key head of a layer, prompt by prompt, the tokens it holds, ascending.

        Tokens are counted from each prompt's first, padding left out. Raises ParameterError before
        there is a prompt.
        """
        layer: Any = self.layers[layer_index]
        kept: list[torch.Tensor] = layer.kept()
        return kept

    def report(self) -> EvictionReport:
        """Return what was kept. Raises ParameterError before there is a prompt."""
        layers: list[Any] = self.layers
        rows: list[RaggedKV] = [layer.there() for layer in layers]
        notes = rows[0].notes
        num_keys = int(notes.num_seen.sum())
        shares = tuple(sum(kv.counts) / num_keys for kv in rows)
        row_bytes = 2 * rows[0].keys.shape[1] * rows[0].keys.element_size()
        return EvictionReport(
            policy=str(self.policy),
            num_prompt=int(notes.num_prompt.sum()) // self._num_kv_heads,
            num_tokens=num_keys // self._num_kv_heads,
            prompt_share=sum(layer.prompt_share for layer in layers) / len(layers),
            kept_share=sum(shares) / len(shares),
            kept_by_layer=shares,
            size_bytes=sum(kv.size_bytes for kv in rows),
            full_bytes=num_keys * row_bytes * len(rows),
            peak_bytes=self._memory.peak,
        )
