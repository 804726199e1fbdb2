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
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import scaled_dot_product_attention

from kvrag.models.decoders import Model
from kvrag.models.families import Chunked, inside
from kvrag.models.implementations import (
    AttentionCall,
    OwnMask,
    attending_by,
    eager_function,
    register_around,
)
from kvrag.native.attention import ATTENTION_TYPES, Mass, Scores, attend
from kvrag.positions.rotary import RotaryTable
from kvrag.process import TurnLock, after_fork

# Rows whose scores are held at a time for one key head: 4 MB a query head at 32,000 keys.
_ROWS_AT_ONCE = 32
# On a GPU, for all heads together: 256 MB, and as much for each step between them and the weights.
_SCORES_AT_ONCE = 1 << 26

Observe = Callable[[slice, slice, torch.Tensor, torch.Tensor], None]
"""Receives which key heads h and rows r read with weights ``[h, G, r, K]`` from ``[h, K, D]``."""


def attend_densely(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    allowed: torch.Tensor,
    scores_of: Scores,
    *,
    sinks: torch.Tensor | None = None,
    observe: Observe | None = None,
    at_once: tuple[int, int] = (1, _ROWS_AT_ONCE),
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
        Called for some key heads after the other, and for their rows in order, with float32.
    at_once
        For how many key heads and rows scores exist at a time.
    """
    _, num_heads, num_rows, head_dim = query.shape
    num_kv_heads, num_keys = key.shape[1], key.shape[2]
    grouped = query.view(num_kv_heads, -1, num_rows, head_dim)
    group = grouped.shape[1]
    output = query.new_empty(num_rows, num_kv_heads, group, value.shape[-1])
    own = None if sinks is None else sinks.view(num_kv_heads, group)
    each, size = at_once
    blocks = [slice(begin, begin + size) for begin in range(0, num_rows, size)]
    # Keys that all rows of a block see need no mask: nearly all keys for a prompt's last rows. To
    # ask for their number would wait for a GPU.
    is_here = key.device.type == "cpu"
    first_hidden = [_first_hidden(allowed[rows]) if is_here else 0 for rows in blocks]
    for heads in (slice(begin, begin + each) for begin in range(0, num_kv_heads, each)):
        keys, values = key[0, heads].float().mT, value[0, heads].float()
        for rows, tail in zip(blocks, first_hidden, strict=True):
            asking = grouped[heads, :, rows].float() * scores_of.scale
            scores = (asking.flatten(1, 2) @ keys).view(*asking.shape[:3], num_keys)
            if scores_of.softcap:
                scores = torch.tanh(scores / scores_of.softcap) * scores_of.softcap
            scores[..., tail:].masked_fill_(~allowed[rows, tail:], float("-inf"))
            weights = _softmax(scores, None if own is None else own[heads])
            taken = (weights.flatten(1, 2) @ values).view(*asking.shape[:3], -1)
            # [h, G, r, D] -> [r, h, G, D]
            output[rows, heads] = taken.permute(2, 0, 1, 3).to(output.dtype)
            if observe is not None:
                observe(heads, rows, weights, values)
    return output.view(1, num_rows, num_heads, value.shape[-1])


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
        observer, allowed = self.observer, self.dense(key.shape[2])
        if not isinstance(observer, MassObserver) or key.device.type == "cpu":

            def show(_: slice, rows: slice, weights: torch.Tensor, values: torch.Tensor) -> None:
                assert observer is not None
                observer(self, rows, weights[0], values[0])

            return attend_densely(query, key, value, allowed, scores, sinks=sinks, observe=show)
        num_heads, num_keys = key.shape[1], key.shape[2]
        mass = torch.zeros(num_heads, num_keys, device=key.device)
        first_row = num_before(self.positions, observer.first_position)

        def note(_: slice, rows: slice, weights: torch.Tensor, __: torch.Tensor) -> None:
            mass.add_(weights[:, :, max(0, first_row - rows.start) :].sum((1, 2)))

        size = max(1, _SCORES_AT_ONCE // (query.shape[1] * num_keys))
        given = query, key, value, allowed, scores
        at_once = num_heads, size
        output = attend_densely(*given, sinks=sinks, observe=note, at_once=at_once)
        observer.note(self, mass, value[0])
        return output

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
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: RowMask, scores: Scores
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
        last_keys, scores = mask.positions - mask.first_key, scores._replace(window=mask.window)
        output = attend(query[0], key[0], value[0], last_keys, scores, mass)
    return output[None]


def _row_attention(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Obey masks of rows, that attend by themselves, or that end the layer."""
    mask = call.mask
    if isinstance(mask, OwnMask):
        return mask.attend(call), None
    if not isinstance(mask, RowMask):
        return call.plainly()
    output = attend_rows(call, mask)
    if mask.stops:
        raise AttentionDone
    return output, None


def attend_rows(call: AttentionCall, mask: RowMask) -> torch.Tensor:
    """Return what rows gather, ``[1, n, heads, D]``, and show the observer."""
    query, key, value, scores, sinks = call.query, call.key, call.value, call.scores, call.sinks
    is_capped = call.more.get("softcap") is not None
    if call.in_kernel:
        output = _attend_in_kernel(query, key, value, mask, scores)
        if output is not None:
            return output
    is_eager = call.is_eager or sinks is not None
    if mask.observer is not None:
        output = mask.show(query, key, value, scores, sinks)
        if not (is_eager or is_capped):
            return output
    if is_eager:
        # Only the family's own function knows its soft-capping and sinks.
        dense = mask.dense(key.shape[2])
        additive = torch.zeros(dense.shape, dtype=query.dtype, device=query.device)
        additive.masked_fill_(~dense, torch.finfo(query.dtype).min)
        plain = eager_function(call.module)
        return call._replace(plain=plain, mask=additive[None, None]).plainly()[0]
    if is_capped:
        # Soft-capping stays as in the plain pipeline, whatever the installed Transformers does with
        # it here (older ones ignore it, newer ones refuse it).
        return call._replace(mask=mask.dense(key.shape[2])[None, None]).plainly()[0]
    _, num_heads, num_rows, head_dim = query.shape
    num_kv_heads = key.shape[1]
    num_groups = num_heads // num_kv_heads
    # Query heads that share a key head become a batch over the *same* keys: expand() copies
    # nothing, whereas Transformers' repeat_kv would copy every key of the prompt per group.
    grouped = query.view(num_kv_heads, num_groups, num_rows, head_dim).transpose(0, 1)
    is_square = mask.is_square and mask.visible is None
    output = scaled_dot_product_attention(
        grouped,
        key.expand(num_groups, -1, -1, -1),
        value.expand(num_groups, -1, -1, -1),
        attn_mask=None if is_square else mask.dense(key.shape[2]),
        is_causal=is_square,
        scale=call.scaling,
    )
    # [G, H, n, D] -> [1, n, H * G, D], the order in which the output projection expects heads.
    return output.permute(2, 1, 0, 3).reshape(1, num_rows, num_heads, value.shape[-1])


def _whole_attention(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend with the last rows of whole sequences, to all keys before each in the window."""
    query, key, value = call.query, call.key, call.value
    num_rows, num_keys = query.shape[2], key.shape[2]
    window = call.more.get("sliding_window")
    rows = RowMask(torch.arange(num_keys - num_rows, num_keys), 0, window)
    outputs = []
    for index in range(len(query)):
        one = slice(index, index + 1)
        output = None
        if call.sinks is None:  # the kernel has no sinks
            output = _attend_in_kernel(query[one], key[one], value[one], rows, call.scores)
        if output is None:
            return call.plainly()
        outputs.append(output)
    return torch.cat(outputs), None


register_around(_NAME, _row_attention)
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


def row_attention(model: Model) -> AbstractContextManager[None]:
    """Make `model` use row attention inside the block. Hold `lock_of` the model."""
    return attending_by(model, _NAME)


def whole_attention(model: Model) -> AbstractContextManager[None]:
    """Make `model` attend in the compiled kernel inside the block, where the kernel can.

    The forward passes in the block are causal, over sequences whose padding is on the right and
    whose cache keeps all keys. Hold `lock_of` the model.
    """
    return attending_by(model, _WHOLE_NAME)
