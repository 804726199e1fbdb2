"""A Transformers cache that applies an eviction policy after the prompt and after every token."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.cache_utils import Cache, CacheLayerMixin

from kvrag.errors import ParameterError, UnsupportedModelError
from kvrag.eviction import EvictionReport
from kvrag.eviction.base import EvictionPolicy, HeldKeys
from kvrag.eviction.registry import make_eviction
from kvrag.models.attention import lock_of
from kvrag.models.families import Chunked, find_family, latent_of, num_kv_heads, sliding_windows
from kvrag.models.implementations import (
    AttentionCall,
    attending_by,
    register_around,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# Free rows after each head's rows in a new block: enough that copying blocks costs little compared
# with reading them at every step.
STEP_ROWS = 64


class RaggedKV:
    """One layer's keys and values of A heads. Head a holds ``counts[a]`` of them.

    Parameters
    ----------
    keys, values
        ``[B, H, N, D]`` with B * H = A.
    held
        What a policy knows about them, in N slots. Only keys with ``held`` are kept.

    Attributes
    ----------
    counts, num_held
        How many keys each head holds: as a list, and as ``[A, 1]`` int64.
    notes
        What policies know about the keys. Its K slots are the heads' rows, in their order.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, held: HeldKeys) -> None:
        kept = [row.nonzero()[:, 0] for row in held.held]
        self.counts = [len(rows) for rows in kept]
        self.keys: torch.Tensor
        self.values: torch.Tensor
        self.num_held: torch.Tensor
        self._lay_out(keys, keys.shape[-1])
        num_slots = max(self._rooms)
        num_heads, device = len(kept), keys.device
        self.notes = HeldKeys(
            torch.zeros(num_heads, num_slots, dtype=torch.long, device=device),
            torch.arange(num_slots, device=device) < self.num_held,
            torch.zeros(num_heads, num_slots, device=device),
            held.num_seen.clone(),
            held.num_prompt.clone(),
            held.num_noted.clone(),
        )
        per_prompt = keys.shape[1]
        for head, (rows, count) in enumerate(zip(kept, self.counts, strict=True)):
            prompt, own = divmod(head, per_prompt)
            of_head = self._rows(head)
            torch.index_select(keys[prompt, own], 0, rows, out=self.keys[of_head])
            torch.index_select(values[prompt, own], 0, rows, out=self.values[of_head])
            self.notes.places[head, :count] = held.places[head, rows]
            self.notes.marks[head, :count] = held.marks[head, rows]

    @property
    def size_bytes(self) -> int:
        """Bytes allocated here, including free rows and notes."""
        notes = self.notes
        tensors = (self.keys, self.values, notes.places, notes.held, notes.marks)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Add one more key and value ``[A, D]`` to each head.

        Returns whether the block of memory was reallocated.
        """
        is_full = any(count == room for count, room in zip(self.counts, self._rooms, strict=True))
        if is_full:
            self._move()
        notes, slots = self.notes, self.num_held
        rows = self._starts_row + slots[:, 0]
        self.keys.index_copy_(0, rows, keys)
        self.values.index_copy_(0, rows, values)
        notes.places.scatter_(1, slots, notes.num_seen)
        notes.marks.scatter_(1, slots, 0.0)
        notes.held.scatter_(1, slots, True)
        notes.num_seen.add_(1)
        self.num_held.add_(1)
        self.counts = [count + 1 for count in self.counts]
        return is_full

    def remove(self, gone: torch.Tensor) -> bool:
        """Forget keys; return whether the block of memory was reallocated.

        Parameters
        ----------
        gone
            ``[A, k]`` bool: which of the first k slots to empty. Each must hold a key.
        """
        if not bool(gone.any()):
            return False
        notes = self.notes.first(gone.shape[1])
        left = self.num_held - gone.sum(1, keepdim=True)
        behind = torch.arange(gone.shape[1], device=gone.device) >= left
        # Each head has as many keys after its new end as it has holes before it.
        holes = (gone & ~behind).nonzero(as_tuple=True)
        movers = (notes.held & ~gone & behind).nonzero(as_tuple=True)
        if len(holes[0]):
            into = self._starts_row[holes[0]] + holes[1]
            out_of = self._starts_row[movers[0]] + movers[1]
            for rows in (self.keys, self.values):
                rows.index_copy_(0, into, rows[out_of])
            for note in (notes.places, notes.marks):
                note[holes] = note[movers]
        notes.held.logical_and_(~behind)
        self.num_held = left
        self.counts = left[:, 0].tolist()
        num_held = sum(self.counts)
        if sum(self._rooms) - num_held > max(2 * STEP_ROWS * len(self.counts), num_held // 4):
            self._move()
            return True
        return False

    def head(self, head: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return one head's keys and values, ``[counts[head], D]`` each, as views."""
        rows = self._rows(head)
        return self.keys[rows], self.values[rows]

    def kept(self) -> list[torch.Tensor]:
        """Return the tokens that each head holds, ascending; heads are ordered by prompt."""
        return [
            places[held].sort().values
            for places, held in zip(self.notes.places, self.notes.held, strict=True)
        ]

    def _rows(self, head: int) -> slice:
        start = self._starts[head]
        return slice(start, start + self.counts[head])

    def _lay_out(self, like: torch.Tensor, head_dim: int) -> None:
        self._rooms = [count + STEP_ROWS for count in self.counts]
        self._starts = [sum(self._rooms[:head]) for head in range(len(self._rooms))]
        self._starts_row = torch.tensor(self._starts, device=like.device)
        self.num_held = torch.tensor(self.counts, device=like.device)[:, None]
        self.keys = like.new_empty(sum(self._rooms), head_dim)
        self.values = torch.empty_like(self.keys)

    def _move(self) -> None:
        """Reallocate the block, with the same free room after each head."""
        old = [self.head(head) for head in range(len(self.counts))]
        self._lay_out(self.keys, self.keys.shape[1])
        for head, (keys, values) in enumerate(old):
            new_keys, new_values = self.head(head)
            new_keys.copy_(keys)
            new_values.copy_(values)
        notes, names = self.notes, ("places", "held", "marks")
        more = max(self._rooms) - notes.places.shape[1]  # below 0, the last slots go
        moved = {name: nn.functional.pad(getattr(notes, name), (0, more)) for name in names}
        self.notes = replace(notes, **moved)


# Attention over the keys that an evicting cache has left, inside unmodified decoder layers.
#
# While the cache is in use, the model's configuration names our attention implementation, through
# Transformers' extension point. A layer gives its cache the fresh keys, gets them back unchanged,
# and passes them to attention. Attention recognises the cache's layer by these keys. Prompts attend
# with the model's own implementation, and the policy sees the weights of their last queries. Later
# tokens attend to the keys that each head has left.


_NAME = "kvrag_evicting"
# At most this many attention weights of a prompt's last queries are in memory at a time (8 MB), but
# at least one query's.
_WEIGHTS_AT_ONCE = 1 << 21


@dataclass(frozen=True)
class Score:
    """How a model's layer weighs keys: scaling and soft-capping."""

    scaling: float
    softcap: float | None

    def cap(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores, soft-capped if the model caps them."""
        if self.softcap is None:
            return scores
        return torch.tanh(scores / self.softcap) * self.softcap


class _Present(threading.local):
    """The state of this thread's forward pass."""

    depth = 0
    layer: EvictingLayer | None = None
    keys: torch.Tensor | None = None


_present = _Present()


def observed_queries(
    query: torch.Tensor, key: torch.Tensor, visible: torch.Tensor, score: Score
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the attention weights of some queries of one prompt, a few queries at a time.

    Parameters
    ----------
    query
        ``[G * H, r, D]``, in order.
    key
        ``[H, N, D]``.
    visible
        ``[r, N]`` bool: which keys each query sees.

    Yields
    ------
    tensor, tensor
        The weights ``[H, G, q, N]`` float32, and ``[q]``: how many keys each query sees.
    """
    num_kv_heads, num_keys, head_dim = key.shape
    grouped = query.view(num_kv_heads, -1, *query.shape[1:])
    at_once = max(1, _WEIGHTS_AT_ONCE // (len(query) * num_keys))
    keys = key.float().transpose(1, 2) * score.scaling
    for seen, asking in zip(
        torch.split(visible, at_once), torch.split(grouped, at_once, dim=2), strict=True
    ):
        rows = asking.float().reshape(num_kv_heads, -1, head_dim) @ keys
        weights = score.cap(rows.view(*asking.shape[:3], num_keys))
        yield weights.masked_fill_(~seen, float("-inf")).softmax(-1), seen.sum(-1)


# From this many query heads for each key head, products with query heads as rows are faster than
# products with keys as rows.
_MANY_GROUPS = 5


def attend_ragged(
    query: torch.Tensor, kv: RaggedKV, score: Score
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with one query for each query head to all keys of its key head.

    Parameters
    ----------
    query
        ``[A, G, D]``.

    Returns
    -------
    tensor, tensor
        The output ``[A, G, D]``, and the weights ``[A, G, k]`` float32 over the first k slots. k is
        the number of keys in the fullest head.
    """
    num_heads, num_groups, _ = query.shape
    asking = query * score.scaling
    heads = [kv.head(head) for head in range(num_heads)]
    most = max(kv.counts)
    if num_groups < _MANY_GROUPS:
        by_key = query.new_empty(num_heads, most, num_groups)
        scores = by_key.transpose(1, 2)
        for head, (keys, _values) in enumerate(heads):
            torch.mm(keys, asking[head].T, out=by_key[head, : len(keys)])
    else:
        scores = query.new_empty(num_heads, num_groups, most)
        for head, (keys, _values) in enumerate(heads):
            torch.mm(asking[head], keys.T, out=scores[head, :, : len(keys)])
    scores = score.cap(scores.float())
    for head, count in enumerate(kv.counts):
        if count < most:
            # After capping, which would turn it into a finite score.
            scores[head, :, count:] = float("-inf")
    weights = scores.softmax(-1)
    taken = weights.to(query.dtype)
    output = torch.empty_like(query)
    for head, (_keys, values) in enumerate(heads):
        torch.mm(taken[head, :, : len(values)], values, out=output[head])
    return output, weights


def _attend(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor | None]:
    query, key, value = call.query, call.key, call.value
    layer = _present.layer if _present.keys is key else None
    if layer is None:
        # A forward in another thread, or with another cache.
        return call.plainly()
    _present.layer = _present.keys = None
    scale = query.shape[-1] ** -0.5 if call.scaling is None else call.scaling
    score = Score(scale, call.more.get("softcap"))
    allowed = call.mask
    if allowed is not None:
        allowed = (allowed if allowed.dtype == torch.bool else allowed == 0)[:, 0]
    if layer.kv is not None:
        return layer.step(query, key, value, allowed, score), None
    output = call.plainly()
    _keep_prompts(layer, query, key, value, allowed, score)
    return output


@torch.no_grad()
def _keep_prompts(
    layer: EvictingLayer,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    allowed: torch.Tensor | None,
    score: Score,
) -> None:
    """Keep what a layer's policy leaves of prompts, after it has seen their last queries.

    Parameters
    ----------
    query, key, value
        ``[B, G * H, N, D]`` and ``[B, H, N, D]``.
    allowed
        ``[B or 1, N, N]`` bool: which rows each row sees; None: itself and all before it.
    """
    num_prompts, num_kv_heads, num_rows, _ = key.shape
    policy, device = layer.policy, key.device
    real = torch.ones(num_prompts, num_rows, dtype=torch.bool, device=device)
    if allowed is not None:
        # A row that does not see itself is padding.
        real &= allowed.diagonal(dim1=1, dim2=2)
    held = HeldKeys.of_prompts(real, num_kv_heads)
    for prompt in range(num_prompts) if policy.num_queries else ():
        asking = real[prompt].nonzero()[-policy.num_queries :, 0]
        if allowed is None:
            visible = torch.arange(num_rows, device=device) <= asking[:, None]
        else:
            visible = allowed[min(prompt, len(allowed) - 1), asking]
        heads = slice(prompt * num_kv_heads, (prompt + 1) * num_kv_heads)
        for weights, num_visible in observed_queries(
            query[prompt, :, asking], key[prompt], visible, score
        ):
            policy.observe(held.part(heads, slice(num_rows)), weights, num_visible)
    layer.keep(held, key, value)


register_around(_NAME, _attend)


class _Memory:
    """Bytes of keys and values in each layer, and their peak."""

    def __init__(self, num_layers: int) -> None:
        self._layers = [0] * num_layers
        self.peak = 0

    @property
    def size(self) -> int:
        return sum(self._layers)

    def note(self, layer_index: int, num_bytes: int, besides: int = 0) -> None:
        """Record a layer's bytes, and the bytes that existed `besides` while they were copied."""
        self._layers[layer_index] = num_bytes
        self.peak = max(self.peak, self.size + besides)

    def forget(self, layer_index: int) -> None:
        """Reset a layer; once all layers are empty, reset the peak too."""
        self._layers[layer_index] = 0
        if not self.size:
            self.peak = 0


class EvictingLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer: it takes the prompt's keys and values once (`keep`), then tokens one by one."""

    is_sliding = False

    def __init__(
        self, policy: EvictionPolicy, window: int | None, layer_index: int, memory: _Memory
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.policy = policy
        self._window = window
        self._layer_index = layer_index
        self._memory = memory
        self._num_rows = 0
        self.kv: RaggedKV | None = None
        self.prompt_share = 1.0
        self.is_initialized = True

    def keep(self, held: HeldKeys, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Take the keys and values ``[B, H, N, D]`` of prompts that the policy does not evict.

        Parameters
        ----------
        held
            The prompts' keys, after the policy has observed its queries.
        """
        self._num_rows = keys.shape[2]
        gone = self.policy.after_prompt(held)
        if gone is not None:
            held.held.logical_and_(~gone)
        if self._window is not None:
            # Keys that the next token will see; no token will see earlier ones again.
            held.held.logical_and_(held.is_recent(self._window - 1))
        self.kv = RaggedKV(keys, values, held)
        self.prompt_share = sum(self.kv.counts) / int(held.num_prompt.sum())
        self._note(2 * keys.numel() * keys.element_size())

    @torch.no_grad()
    def step(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        allowed: torch.Tensor | None,
        score: Score,
    ) -> torch.Tensor:
        """Add n tokens one by one, and evict after each.

        Parameters
        ----------
        query, key, value
            ``[B, G * H, n, D]`` and ``[B, H, n, D]``.
        allowed
            ``[B or 1, n, N]`` bool: which rows each token sees, of all rows so far, including
            evicted ones; None: itself and all before it.

        Returns
        -------
        tensor
            ``[B, n, G * H, D]``.

        Raises
        ------
        ParameterError
            For another batch, or one with padding after the prompts' first tokens.
        """
        assert self.kv is not None
        num_prompts, num_kv_heads, num_new, head_dim = key.shape
        num_heads = num_prompts * num_kv_heads
        if num_heads != len(self.kv.counts):
            raise ParameterError(
                f"an evicting cache of {len(self.kv.counts) // num_kv_heads} prompts was given "
                f"{num_prompts}: make a new cache for another batch"
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
        """Raise ParameterError unless the last row sees all tokens of its prompt."""
        assert self.kv is not None
        expected = self.kv.notes.num_seen[:: len(self.kv.counts) // num_prompts, 0] + num_new
        if self._window is not None:
            expected = expected.clamp(max=self._window)
        if not bool((allowed[:, -1].sum(-1) == expected).all()):
            raise ParameterError(
                "padding after the prompts of an evicting cache, where each row must be a token: "
                "add equally many tokens to each prompt, or use a cache for each"
            )

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Add one token to each head, ``[A, D]``."""
        assert self.kv is not None
        before = self.kv.size_bytes
        if self.kv.append(keys, values):
            self._note(before)

    def evict(self, weights: torch.Tensor) -> None:
        """Forget what the policy evicts after a token with attention weights ``[A, G, k]``."""
        assert self.kv is not None
        keys = self.kv.notes.first(weights.shape[2])
        self.policy.observe(keys, weights[:, :, None], self.kv.num_held)
        gone = self.policy.after_step(keys)
        if self._window is not None:
            passed = keys.held & ~keys.is_recent(self._window - 1)
            gone = passed if gone is None else gone | passed
        before = self.kv.size_bytes
        if gone is not None and self.kv.remove(gone):
            self._note(before)

    def _note(self, besides: int) -> None:
        assert self.kv is not None
        self._memory.note(self._layer_index, self.kv.size_bytes, besides)

    # -- the interface of Transformers ----------------------------------------------------------

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not _present.depth:
            raise ParameterError(
                "an evicting cache was used with ordinary attention, which does not know the keys "
                "that are left: call the model inside 'with cache.attending(model):'"
            )
        _present.layer, _present.keys = self, key_states
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._num_rows + query_length, 0

    def get_seq_length(self) -> int:
        return self._num_rows

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        """Forget everything."""
        self.kv = None
        self._num_rows = 0
        self.prompt_share = 1.0
        self._memory.forget(self._layer_index)

    def crop(self, *args: Any, **kwargs: Any) -> None:
        raise ParameterError(
            "an evicting cache cannot remove tokens, since the keys evicted for them are gone: "
            "generate without an assistant and without prompt lookup"
        )

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        raise ParameterError("an evicting cache does not support beams: generate with num_beams=1")


def check_evictable(model: PreTrainedModel) -> None:
    """Raise UnsupportedModelError for a model whose attention does not allow eviction."""
    if find_family(model).attends_itself:
        raise UnsupportedModelError(
            f"model type {model.config.model_type!r} has its own attention code, which does not "
            "support heads of different lengths; leave eviction out"
        )
    has_sinks = any(name.endswith("sinks") for name, _ in model.named_parameters())
    in_chunks = any(isinstance(one, Chunked) for one in sliding_windows(model))
    if has_sinks or in_chunks or latent_of(model.config):
        raise UnsupportedModelError(
            f"model type {model.config.model_type!r} has sinks, chunks or latents in its "
            "attention, which evicting keys does not know; leave eviction out"
        )


class EvictingCache(Cache):
    """A Transformers cache that forgets the keys that a policy chooses.

    Use it as ``with cache.attending(model): model.generate(..., cache=cache)``, for one
    prompt or a batch padded on the left. Positions stay those of the whole text: keys stay rotated
    to them, and the cache counts forgotten tokens too. Each head keeps its own set of keys. The
    memory of forgotten keys is freed. Deep copies are independent.

    Parameters
    ----------
    model
        The model that will use the cache, of a supported family.
    policy
        An `EvictionPolicy`, or its name with parameters (`make_eviction`).

    Raises
    ------
    UnsupportedModelError
        For models with their own attention code (BLOOM, MPT, Falcon).
    ParameterError
        For an unknown policy, or ``"none"``, which needs no evicting cache.
    """

    def __init__(self, model: PreTrainedModel, policy: str | EvictionPolicy) -> None:
        check_evictable(model)
        made = make_eviction(policy)
        if made is None:
            raise ParameterError("eviction 'none' needs no evicting cache: use another cache")
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
        """Let forwards of the model in this thread use evicting caches. Holds the model's lock."""
        with lock_of(model), attending_by(model, _NAME):
            _present.depth += 1
            try:
                yield
            finally:
                _present.depth -= 1
                _present.layer = _present.keys = None

    def besides(self, num_bytes: int) -> None:
        """Count memory that existed besides the cache until now, such as a prompt's buffer."""
        self._memory.peak = max(self._memory.peak, self._memory.size + num_bytes)

    def kept(self, layer_index: int) -> list[torch.Tensor]:
        """Return the tokens that each key head of a layer holds, ascending, ordered by prompt.

        Tokens are counted from each prompt's first, without padding. Raises ParameterError before
        there is a prompt.
        """
        return self._rows()[layer_index].kept()

    def _rows(self) -> list[RaggedKV]:
        layers: list[Any] = self.layers
        if any(layer.kv is None for layer in layers):
            raise ParameterError(
                "an evicting cache without a prompt has nothing to report: call the model first"
            )
        return [layer.kv for layer in layers]

    def report(self) -> EvictionReport:
        """Report what was kept. Raises ParameterError before there is a prompt."""
        layers: list[Any] = self.layers
        rows = self._rows()
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
