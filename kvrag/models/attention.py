"""Attention of selected rows over a whole prompt's keys, inside unmodified decoder layers.

While rows are being recomputed, the model's configuration names one of our implementations as its
attention (Transformers' own extension point), and the attention mask handed to the layers is a
`RowMask`. The layers pass it through untouched. So on the CPU no mask of prompt length squared
exists, and the selected queries need not be contiguous. Another caller's forward on the same model
brings an ordinary mask and gets ordinary attention.

While whole chunks are encoded, the configuration names another one, whose rows are the last of all
keys. On the CPU it attends in the compiled kernel, which takes a third of PyTorch's time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from kvrag.models.decoders import Model
from kvrag.models.families import Chunked, inside
from kvrag.models.implementations import (
    AttentionCall,
    AttentionFunction,
    OwnMask,
    attending_by,
    eager_function,
    register_around,
    register_attention,
    sdpa_of_transformers,
)
from kvrag.native import ATTENTION_TYPES, Mass, Scores, attend
from kvrag.positions.rotary import RotaryTable
from kvrag.process import TurnLock, after_fork

# Rows whose scores are held at a time for one key head: 4 MB a query head at 32,000 keys.
_ROWS_AT_ONCE = 32
# On a GPU, for all heads together: 256 MB, and as much for each step between them and the weights.
_SCORES_AT_ONCE = 1 << 26

Observe = Callable[[slice, torch.Tensor, torch.Tensor], None]
"""Receives which rows r read with weights ``[G, r, K]`` from a key head's ``[K, D]``, float32."""


def attend_by_head(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    allowed: torch.Tensor,
    scores_of: Scores,
    *,
    sinks: torch.Tensor | None = None,
    observe: Observe | None = None,
) -> torch.Tensor:
    """Return ``[1, n, heads, D]``, as Transformers' attention functions do.

    Parameters
    ----------
    query, key, value
        ``[1, G * H, n, D]`` and ``[1, H, K, D]``.
    allowed
        ``[n, K]`` bool: which rows see which keys.
    scores_of
        How keys are weighed; `allowed` has the window.
    sinks
        ``[G * H]``: the score of what a head sees besides keys, if the model has one.
    observe
        Called for each key head in turn, and for its rows in order.
    """
    _, num_heads, num_rows, head_dim = query.shape
    num_kv_heads, num_keys = key.shape[1], key.shape[2]
    grouped = query.view(num_kv_heads, -1, num_rows, head_dim)
    output = query.new_empty(num_rows, num_heads, value.shape[-1])
    by_head = output.view(num_rows, num_kv_heads, -1, value.shape[-1])
    blocks = [slice(begin, begin + _ROWS_AT_ONCE) for begin in range(0, num_rows, _ROWS_AT_ONCE)]
    # Keys that all rows of a block see need no mask: nearly all keys for a prompt's last rows.
    first_hidden = [_first_hidden(allowed[rows]) for rows in blocks]
    for head in range(num_kv_heads):
        keys, values = key[0, head].float().T, value[0, head].float()
        for rows, tail in zip(blocks, first_hidden, strict=True):
            asking = grouped[head, :, rows].float() * scores_of.scale
            scores = (asking.flatten(0, 1) @ keys).view(*asking.shape[:2], num_keys)
            if scores_of.softcap:
                scores = torch.tanh(scores / scores_of.softcap) * scores_of.softcap
            scores[..., tail:].masked_fill_(~allowed[rows, tail:], float("-inf"))
            own = None if sinks is None else sinks.view(num_kv_heads, -1)[head]
            weights = _softmax(scores, own)
            taken = (weights.flatten(0, 1) @ values).view(*asking.shape[:2], -1)
            by_head[rows, head] = taken.transpose(0, 1).to(output.dtype)
            if observe is not None:
                observe(rows, weights, values)
    return output[None]


def attend_by_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    allowed: torch.Tensor,
    scores_of: Scores,
    first_row: int,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `attend_by_head` does, all heads at once, and what each key gets: for a GPU.

    Parameters
    ----------
    query, key, value, allowed, scores_of, sinks
        As for `attend_by_head`.
    first_row
        The first of the rows whose weights count.

    Returns
    -------
    tensor, tensor
        The output ``[1, n, heads, D]``, and the weights ``[H, K]`` float32, summed over rows from
        `first_row` on and over the query heads of a key head.
    """
    _, num_heads, num_rows, head_dim = query.shape
    num_kv_heads, num_keys = key.shape[1], key.shape[2]
    grouped = query.view(num_kv_heads, -1, num_rows, head_dim)
    keys, values = key[0].float().transpose(1, 2), value[0].float()
    mass = torch.zeros(num_kv_heads, num_keys, device=key.device)
    outputs = []
    size = max(1, _SCORES_AT_ONCE // (num_heads * num_keys))
    for begin in range(0, num_rows, size):
        rows = slice(begin, begin + size)
        asking = grouped[:, :, rows].float() * scores_of.scale
        scores = (asking.flatten(1, 2) @ keys).view(*asking.shape[:3], num_keys)
        if scores_of.softcap:
            scores = torch.tanh(scores / scores_of.softcap) * scores_of.softcap
        own = None if sinks is None else sinks.view(num_kv_heads, -1)
        weights = _softmax(scores.masked_fill_(~allowed[rows], float("-inf")), own)
        mass += weights[:, :, max(0, first_row - begin) :].sum((1, 2))
        taken = (weights.flatten(1, 2) @ values).view(*asking.shape[:3], -1)
        # [H, G, r, D] -> [r, H, G, D]
        outputs.append(taken.permute(2, 0, 1, 3).to(query.dtype))
    return torch.cat(outputs).view(1, num_rows, num_heads, value.shape[-1]), mass


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Return the weights of scores ``[..., G, r, K]``, beside a sink for each of G, if any."""
    if sinks is None:
        return scores.softmax(-1)
    beside = sinks.float()[..., None, None].expand(*scores.shape[:-1], 1)
    return torch.cat([scores, beside], -1).softmax(-1)[..., :-1]


def _first_hidden(allowed: torch.Tensor) -> int:
    """Return how many of the first keys all rows see."""
    return int(allowed.all(0).int().cumprod(0).sum())


_NAME = "kvrag_rows"
_WHOLE_NAME = "kvrag_whole"

_locks: WeakKeyDictionary[Model, TurnLock] = WeakKeyDictionary()
_making_locks = threading.Lock()


class AttentionObserver(Protocol):
    """Observes a block of rows while it attends."""

    def __call__(
        self, mask: RowMask, rows: slice, weights: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Note what some rows read from the keys of one key head.

        Parameters
        ----------
        mask
            The block's mask; the keys are those of the positions from ``mask.first_key`` on.
        rows
            Indices of the r rows in ``mask.positions``.
        weights
            ``[G, r, K]`` float32, attention weights of the query heads that share the key head.
        value
            ``[K, D]``, the key head's values.
        """


@dataclass(frozen=True)
class MassObserver:
    """An observer that needs only what keys get in all, which the kernel sums up by itself.

    Attributes
    ----------
    first_position
        Rows from this position on count.
    note
        Receives a block's mask, the weights ``[H, K]`` float32 that keys get, summed over rows and
        over the query heads of a key head, and the values ``[H, K, D]``. H is 1 or all key heads.
    taken
        Where a card's kernel adds it up instead, times the values' norms: ``[M, N]`` float32 for M
        layers and all keys, and the first of the layers. None: it calls `note`.
    """

    first_position: int
    note: Callable[[RowMask, torch.Tensor, torch.Tensor], None]
    taken: tuple[torch.Tensor, int] | None = None

    def __call__(
        self, mask: RowMask, rows: slice, weights: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Sum up weights, as an `AttentionObserver`."""
        first_row = int((mask.positions[rows] < self.first_position).sum())
        self.note(mask, weights[:, first_row:].sum((0, 1))[None], value[None])


class AttentionDone(Exception):  # noqa: N818  # control flow, not an error
    """Leaves a decoder layer after its attention, before its MLP runs."""


@dataclass
class KnownRows:
    """What all layers ask of the same rows. On a GPU, to ask costs kernels, or a wait.

    Attributes
    ----------
    numbers
        The rows, on the host; None until somebody asks.
    last
        The last row; None until somebody asks.
    embeddings
        Cosines and sines, and positions, by a table's id. The table stays alive with them.
    masks
        By first key, number of keys and window.
    blocks
        By the size of a block of rows: copies of the blocks, and the last row of each.
    """

    numbers: NDArray[np.int64] | None = None
    last: int | None = None
    embeddings: dict[int, tuple[RotaryTable, Any, torch.Tensor]] = field(default_factory=dict)
    masks: dict[tuple[int, int, int | None], torch.Tensor] = field(default_factory=dict)
    blocks: dict[int, list[tuple[torch.Tensor, int]]] = field(default_factory=dict)


_KNOWN = "_kvrag_known"
"""An attribute of the tensor itself: equal rows in another one are not known."""


def known_rows(rows: torch.Tensor) -> KnownRows:
    """Return what is known of rows ``[n]``, as long as the tensor lives."""
    found: KnownRows | None = getattr(rows, _KNOWN, None)
    if found is None:
        found = KnownRows()
        setattr(rows, _KNOWN, found)
    return found


def rows_on(device: torch.device, rows: torch.Tensor) -> torch.Tensor:
    """Bring ascending rows from the host to a device, and keep them known here."""
    there = rows.to(device, non_blocking=True)
    known = known_rows(there)
    known.numbers = rows.numpy()
    known.last = int(rows[-1]) if len(rows) else None
    return there


def host_rows(rows: torch.Tensor) -> torch.Tensor:
    """Return rows on the host. If they are not known, this waits for a GPU."""
    known = known_rows(rows)
    if known.numbers is None:
        known.numbers = rows.cpu().numpy()
    return torch.from_numpy(known.numbers)


def num_before(rows: torch.Tensor, position: int) -> int:
    """Return how many rows, which ascend, are before a position."""
    return int(np.searchsorted(host_rows(rows).numpy(), position))


def last_row(rows: torch.Tensor) -> torch.Tensor:
    """Return the last row ``[1]``; it is known on the host if that of `rows` is."""
    one, last = rows[-1:], known_rows(rows).last
    if last is not None:
        known_rows(one).numbers, known_rows(one).last = np.array([last]), last
    return one


@dataclass(frozen=True)
class RowMask:
    """Which keys a block of selected rows may see.

    Attributes
    ----------
    positions
        ``[n]`` global positions of the query rows, ascending.
    first_key
        Global position of the first key handed to attention (later for sliding windows).
    window
        Width of the layer's sliding window in tokens, or None.
    observer
        Receives what the rows attend with, before they attend; None: nothing observes.
    visible
        ``[n, K]`` bool: the keys that each row sees, if not all before it; None: all before it.
    stops
        Whether the layer ends after its attention, with `AttentionDone`.
    is_square
        Whether the rows are as many as the keys, each of which sees all before it: a prefill.
    known
        What other layers have asked of these rows; None: these are not all rows.
    """

    positions: torch.Tensor
    first_key: int
    window: int | None
    observer: AttentionObserver | None = None
    visible: torch.Tensor | None = None
    stops: bool = False
    is_square: bool = False
    known: KnownRows | None = None

    def show(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scores: Scores,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Show the observer what rows read; return it: ``[1, n, heads, D]``."""
        assert self.observer is not None
        allowed, observe = self.dense(key.shape[2]), partial(self.observer, self)
        if isinstance(self.observer, MassObserver) and key.device.type != "cpu":
            first_row = num_before(self.positions, self.observer.first_position)
            output, mass = attend_by_rows(query, key, value, allowed, scores, first_row, sinks)
            self.observer.note(self, mass, value[0])
            return output
        return attend_by_head(query, key, value, allowed, scores, sinks=sinks, observe=observe)

    @contextmanager
    def noting(self, value: torch.Tensor) -> Iterator[Mass | None]:
        """Give a kernel a place for the keys' mass, if it is observed, and show it afterwards.

        Parameters
        ----------
        value
            ``[H, K, D]``, the values of the keys that rows attend to.
        """
        if not isinstance(self.observer, MassObserver):
            yield None
            return
        taken = torch.empty(value.shape[:2], dtype=torch.float32)
        yield Mass(taken, num_before(self.positions, self.observer.first_position))
        self.observer.note(self, taken, value)

    def dense(self, num_keys: int) -> torch.Tensor:
        """Return the boolean mask ``[n, num_keys]``: key_position <= query_position, in window."""
        if self.visible is not None:
            return self.visible[:, :num_keys]
        if self.known is None or self.positions.device.type == "cpu":
            return self._dense(num_keys)
        key = self.first_key, num_keys, self.window
        if key not in self.known.masks:
            self.known.masks[key] = self._dense(num_keys)
        return self.known.masks[key]

    def _dense(self, num_keys: int) -> torch.Tensor:
        keys = torch.arange(self.first_key, self.first_key + num_keys, device=self.positions.device)
        queries = self.positions[:, None]
        mask, near = keys <= queries, inside(keys, queries, self.window)
        return mask if near is None else mask & near


def _attend_in_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: RowMask,
    scores: Scores,
) -> torch.Tensor | None:
    """Return ``[1, n, heads, D]`` and show the observer; None if PyTorch has to compute it."""
    observer = mask.observer
    if not (
        query.device.type == "cpu"
        and query.dtype in ATTENTION_TYPES
        and mask.visible is None
        and not isinstance(mask.window, Chunked)
        and key.shape[-1] == value.shape[-1]
        and (observer is None or isinstance(observer, MassObserver))
        # The kernel has no gradients, and reads channels one after the other.
        and all(part.stride(-1) == 1 and not part.requires_grad for part in (query, key, value))
    ):
        return None
    with mask.noting(value[0]) as mass:
        output = attend(
            query[0],
            key[0],
            value[0],
            mask.positions - mask.first_key,
            scores._replace(window=mask.window),
            mass,
        )
    return output[None]


def _scores_of(query: torch.Tensor, scaling: float | None, softcap: float | None) -> Scores:
    """Return how a layer weighs keys, by what it gives to its attention function."""
    return Scores(query.shape[-1] ** -0.5 if scaling is None else scaling, softcap or 0.0)


def _row_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: RowMask | torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if not isinstance(attention_mask, RowMask):
        return sdpa_of_transformers(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    if kwargs.get("s_aux") is not None:  # only the family's own function knows sinks
        return _row_attention_eager(module, query, key, value, attention_mask, scaling, **kwargs)
    softcap = kwargs.get("softcap")
    scores = _scores_of(query, scaling, softcap)
    if softcap is None:
        output = _attend_in_kernel(query, key, value, attention_mask, scores)
        if output is not None:
            return output, None
    if attention_mask.observer is not None:
        output = attention_mask.show(query, key, value, scores)
        if softcap is None:
            return output, None
    if softcap is not None:
        # Soft-capping stays as in the plain pipeline, whatever the installed Transformers does with
        # it here (older ones ignore it, newer ones refuse it).
        mask = attention_mask.dense(key.shape[2])[None, None]
        return sdpa_of_transformers(module, query, key, value, mask, scaling=scaling, **kwargs)
    _, num_heads, num_rows, head_dim = query.shape
    num_kv_heads = key.shape[1]
    num_groups = num_heads // num_kv_heads
    # Query heads that share a key head become a batch over the *same* keys: expand() copies
    # nothing, whereas Transformers' repeat_kv would copy every key of the prompt per group.
    grouped = query.view(num_kv_heads, num_groups, num_rows, head_dim).transpose(0, 1)
    is_square = attention_mask.is_square and attention_mask.visible is None
    output = scaled_dot_product_attention(
        grouped,
        key.expand(num_groups, -1, -1, -1),
        value.expand(num_groups, -1, -1, -1),
        attn_mask=None if is_square else attention_mask.dense(key.shape[2]),
        is_causal=is_square,
        scale=scaling,
    )
    # [G, H, n, D] -> [1, n, H * G, D], the order in which the output projection expects heads.
    return output.permute(2, 1, 0, 3).reshape(1, num_rows, num_heads, value.shape[-1]), None


def _row_attention_eager(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: RowMask | torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend with the family's own eager function: only that one knows its soft-capping."""
    if isinstance(attention_mask, RowMask):
        scores = _scores_of(query, scaling, kwargs.get("softcap"))
        # The kernel has soft caps but no sinks.
        if scores.softcap and kwargs.get("s_aux") is None:
            output = _attend_in_kernel(query, key, value, attention_mask, scores)
            if output is not None:
                return output, None
        if attention_mask.observer is not None:
            attention_mask.show(query, key, value, scores, kwargs.get("s_aux"))
        mask = attention_mask.dense(key.shape[2])
        additive = torch.zeros(mask.shape, dtype=query.dtype, device=query.device)
        additive.masked_fill_(~mask, torch.finfo(query.dtype).min)
        attention_mask = additive[None, None]
    return eager_function(module)(
        module, query, key, value, attention_mask, scaling=scaling, **kwargs
    )


def _obeying(attend: AttentionFunction, *, caps: bool) -> AttentionFunction:
    """Wrap `attend` so that it obeys masks that attend by themselves, or that end the layer.

    Parameters
    ----------
    caps
        Whether `attend` leaves soft-capped scores to the kernel, or those without a cap.
    """

    def attention(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: RowMask | OwnMask | torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if isinstance(attention_mask, OwnMask):
            is_capped = kwargs.get("softcap") is not None
            in_kernel = is_capped is caps and kwargs.get("s_aux") is None
            return attention_mask.attend(
                attend, module, query, key, value, in_kernel=in_kernel, **kwargs
            ), None
        output = attend(module, query, key, value, attention_mask, **kwargs)
        if isinstance(attention_mask, RowMask) and attention_mask.stops:
            raise AttentionDone
        return output

    return attention


def _whole_attention(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend with the last rows of whole sequences, to all keys before each in the window."""
    query, key, value, kwargs = call.query, call.key, call.value, call.more
    scores = _scores_of(query, call.scaling, kwargs.get("softcap"))
    num_rows, num_keys = query.shape[2], key.shape[2]
    rows = RowMask(torch.arange(num_keys - num_rows, num_keys), 0, kwargs.get("sliding_window"))
    outputs = []
    for index in range(len(query)):
        one = slice(index, index + 1)
        output = None
        if kwargs.get("s_aux") is None:  # the kernel has no sinks
            output = _attend_in_kernel(query[one], key[one], value[one], rows, scores)
        if output is None:
            return call.plainly()
        outputs.append(output)
    return torch.cat(outputs), None


register_attention(
    _NAME,
    _obeying(_row_attention, caps=False),
    _obeying(_row_attention_eager, caps=True),
)
register_around(_WHOLE_NAME, _whole_attention)


def lock_of(model: Model) -> TurnLock:
    """Return the lock of a loaded model; all `KVModel`s over it share this lock."""
    with _making_locks:
        return _locks.setdefault(model, TurnLock())


def share_lock(model: Model, lock: TurnLock) -> None:
    """Let a loaded model have another one's lock, over whose weights it is."""
    with _making_locks:
        _locks[model] = lock


def _forget() -> None:
    """Forget the locks: those who held them are not in a forked process."""
    global _making_locks
    _making_locks = threading.Lock()
    _locks.clear()


after_fork(_forget)


@contextmanager
def row_attention(model: Model) -> Iterator[None]:
    """Make `model` use row attention inside the block. Hold `lock_of` the model."""
    with attending_by(model, _NAME):
        yield


@contextmanager
def whole_attention(model: Model) -> Iterator[None]:
    """Make `model` attend in the compiled kernel inside the block, where the kernel can.

    The forward passes in the block are causal, over sequences whose padding is on the right and
    whose cache keeps all keys. Hold `lock_of` the model.
    """
    with attending_by(model, _WHOLE_NAME):
        yield
