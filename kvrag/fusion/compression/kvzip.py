"""KVzip: each head keeps the KV that the model needs most to repeat the chunk.

Source: KVzip (Kim et al., arXiv 2505.23416) §3: the model is asked to repeat the text that it has
read. A key's score is the maximum attention that any of the repeated tokens gives it. Keys that
rebuild the text serve any question about it, so a chunk can be compressed before any question is
known. Long chunks are repeated in parts (§3.4).

Deviations: every head keeps the same number of keys, so that a record stays an array; the paper
spreads one budget over heads and layers. No row is kept for being first: the attention sink is the
shared prefix, whose rows are not stored. A prompt contains only the stored rows, side by side
(`kvrag.fusion.compression.compacting`); the tokens that a row comes from differ between heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvrag.errors import ParameterError
from kvrag.fusion.compression.spec import Compression
from kvrag.kvcache import ChunkKV, FusedKV
from kvrag.models.attention import AttentionObserver, RowMask
from kvrag.models.kv_model import KVModel
from kvrag.models.rows import Attending, RowPass
from kvrag.positions.rotary import RotaryTable

_REQUEST = "\n\nRepeat the previous context exactly."
_REQUEST_PART = "\n\nRepeat the part of the previous context exactly, starting with"
# Tokens repeated at a time, and how many of the previous part's the request quotes (§3.4).
_PART_TOKENS = 2048
_NAMED_TOKENS = 8


def room_to_repeat(tokenizer: Any, num_tokens: int) -> int:
    """Return the positions needed after a chunk of `num_tokens` tokens to repeat it.

    With fewer positions, the chunk is repeated in smaller parts, down to one token each.
    """
    line_end = _tokenised(tokenizer, "\n")
    whole = len(_tokenised(tokenizer, _REQUEST))
    part = len(_tokenised(tokenizer, _REQUEST_PART)) + _NAMED_TOKENS
    return max(whole, part) + len(line_end) + min(_PART_TOKENS, num_tokens)


def _tokenised(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def keep_rebuilding(
    model: KVModel,
    prefix_ids: Sequence[int],
    token_ids: Sequence[int],
    compression: Compression,
) -> ChunkKV:
    """Return the position-free KV of a chunk that each head needs most to repeat it.

    Parameters
    ----------
    model
        The model.
    prefix_ids
        Token ids before the chunk, whose KV is not kept.
    token_ids
        The chunk's T >= 1 token ids.
    compression
        Sets how many rows to keep.

    Returns
    -------
    ChunkKV
        ``[L, H, n, D]``: for each layer and head, n of the chunk's rows, in order.

    Raises
    ------
    ParameterError
        If the model's context has no room to repeat any of the chunk after it.
    """
    whole, scores = score_by_repeating(model, prefix_ids, token_ids)
    return keep_highest(whole, scores, compression.num_rows(len(token_ids)))


def keep_highest(whole: ChunkKV, scores: torch.Tensor, num_rows: int) -> ChunkKV:
    """Return for each layer and head the `num_rows` rows with the highest scores, in order.

    `scores` is ``[L, H, T]``. Ties take the last row, which a sliding window shows longest.
    """
    ascending = scores.sort(dim=-1, stable=True).indices
    kept = (
        ascending[..., -num_rows:]
        .sort(dim=-1)
        .values[..., None]
        .expand(-1, -1, -1, whole.keys.shape[-1])
    )
    return ChunkKV(whole.keys.gather(2, kept), whole.values.gather(2, kept))


@torch.no_grad()
def score_by_repeating(
    model: KVModel, prefix_ids: Sequence[int], token_ids: Sequence[int]
) -> tuple[ChunkKV, torch.Tensor]:
    """Return a chunk's position-free KV and the scores of its keys, ``[L, H, T]`` float32.

    A key's score is the maximum attention that any token gives it while the model repeats the
    chunk. If several query heads share a key head, the maximum over them counts. Memory grows
    linearly with the chunk.
    """
    num_before, num_tokens = len(prefix_ids), len(token_ids)
    first = num_before + num_tokens
    parts = list(_parts(model, token_ids, model.max_positions - first))
    capacity = first + max(len(part.asked_ids) for part in parts)
    spec = model.spec
    fused = FusedKV(spec, first, capacity, model.device)
    tables = model.tables(capacity)
    shape = (spec.num_layers, spec.num_kv_heads, num_tokens)
    scores = torch.zeros(shape, device=model.device)
    with model.computing_rows():
        _compute(model, [*prefix_ids, *token_ids], 0, fused, tables)
        for part in parts:
            span = range(num_before + part.start, num_before + part.end)
            taken = [_Taken(layer, range(num_before, first), span) for layer in scores]
            _compute(model, part.asked_ids, first, fused, tables, taken)
    dtype = model.chunk_spec.dtype
    keys = torch.empty((*shape, spec.head_dim), dtype=dtype, device=model.device)
    rows = slice(num_before, first)
    for layer_index, table in enumerate(tables):
        table.strip(fused.keys[layer_index][0, :, rows], rows, keys[layer_index])
    values = torch.stack([layer[0, :, rows].to(dtype) for layer in fused.values])
    return ChunkKV(keys.cpu(), values.cpu()), scores.cpu()


@dataclass(frozen=True)
class _Part:
    """Tokens of a chunk that are repeated in one go, and the ids to compute for that."""

    start: int
    end: int
    asked_ids: list[int]


class _Taken:
    """Records the maximum attention that any row gives each key of a part, in one layer.

    An observer of `KVModel.forward_rows`. Attention to the chunk's other parts does not count: the
    rest is normalised as if they were not there (§3.4).

    Parameters
    ----------
    scores
        ``[H, T]`` of the chunk, raised in place to the observed maximum.
    chunk, part
        Positions of the chunk and of the part.
    """

    def __init__(self, scores: torch.Tensor, chunk: range, part: range) -> None:
        self._scores = scores
        self._chunk = chunk
        self._part = part
        self._mask: RowMask | None = None
        self._head = 0

    def __call__(
        self,
        mask: RowMask,
        rows: slice,
        weights: torch.Tensor,
        value: torch.Tensor,  # noqa: ARG002
    ) -> None:
        # For each block of rows, heads come one after the other, each from its first row on.
        if mask is not self._mask:
            self._mask, self._head = mask, -1
        self._head += rows.start == 0
        # A sliding window shows only the last keys; earlier keys get no attention.
        begin, start, end, stop = (
            max(0, edge - mask.first_key)
            for edge in (self._chunk.start, self._part.start, self._part.stop, self._chunk.stop)
        )
        taken = weights[..., start:end]
        # Summed, not subtracted from 1: this part may get almost no attention.
        shares = (weights[..., :begin], taken, weights[..., stop:])
        total = torch.stack([share.sum(-1) for share in shares]).sum(0)
        taken = taken / total.clamp(min=torch.finfo(total.dtype).tiny)[..., None]
        first = mask.first_key - self._chunk.start
        scores = self._scores[self._head, first + start : first + end]
        torch.maximum(scores, taken.amax((0, 1)), out=scores)


def _compute(
    model: KVModel,
    token_ids: Sequence[int],
    start: int,
    fused: FusedKV,
    tables: Sequence[RotaryTable],
    observers: Sequence[AttentionObserver | None] | None = None,
) -> None:
    """Compute tokens at positions from `start` on, after those in the buffer."""
    rows = torch.arange(start, start + len(token_ids), device=model.device)
    hidden = model.embed(torch.tensor(token_ids, device=model.device), rows)
    of = RowPass(rows, fused, tables)
    for layer_index in range(len(tables)):
        observer = None if observers is None else observers[layer_index]
        attending = Attending(observer=observer)
        model.forward_rows(layer_index, hidden, of, attending=attending)


def _parts(model: KVModel, token_ids: Sequence[int], room: int) -> Iterator[_Part]:
    """Yield the parts of a chunk, each as long as the `room` after the chunk allows."""
    line_end = _tokenised(model.tokenizer, "\n")
    request = [*_tokenised(model.tokenizer, _REQUEST), *line_end]
    further = _tokenised(model.tokenizer, _REQUEST_PART)
    length = min(_PART_TOKENS, room - room_to_repeat(model.tokenizer, 0))
    if length < 1:
        raise ParameterError(
            f"compression kvzip: a chunk of {len(token_ids)} tokens leaves {room} of the "
            f"{model.max_positions} positions of {model.name} to repeat it; choose smaller "
            "chunks (chunk_tokens), about half of the model's context"
        )
    for begin in range(0, len(token_ids), length):
        if begin:
            request = [*further, *token_ids[max(0, begin - _NAMED_TOKENS) : begin], *line_end]
        again = token_ids[begin : begin + length]
        yield _Part(begin, begin + len(again), [*request, *again])
