"""One prompt, with ways to replace or compute again what is stored of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from kvrag.codec.registry import get_codec
from kvrag.fusion.policies.none import NonePolicy
from kvrag.fusion.question import QuestionAttention
from kvrag.kvcache import FusedKV
from kvrag.models.kv_model import KVModel
from kvrag.models.rows import Attending, RowPass
from kvrag_bench.judge.answers import Answerer, compare
from kvrag_bench.judge.bank import ChunkBank
from kvrag_bench.judge.continuing import FullContinuation
from kvrag_bench.judge.judgements import Asked
from kvrag_bench.quality.oracle import fill

MAX_TOKENS = 16
"""The longest answer, in tokens."""

_NOTHING = torch.empty(0, dtype=torch.long)

Filled = tuple[FusedKV, torch.Tensor]
"""A prompt's KV, and the logits of its first answer token."""


class Trial:
    """One question: full prefill's KV, and ways to replace it.

    Attributes
    ----------
    full
        Full prefill's KV of the prompt.
    chunks
        For each chunk that does not stand first, the positions of its tokens.
    rows
        ``[n]``: the positions of all of them, ascending.
    """

    def __init__(self, model: KVModel, asked: Asked) -> None:
        bank = ChunkBank(model, asked.question.passages, [get_codec("raw")])
        opener = bank.opener("raw")
        layout = bank.lay_out(asked.prompt, asked.question.passages)
        token_ids = asked.prompt.token_ids(model.tokenizer)
        alone = fill(model, layout, opener, NonePolicy())
        self._model = model
        self._token_ids = torch.tensor(token_ids)
        self._tables = model.tables(len(token_ids))
        self._reference = Answerer(model, MAX_TOKENS).reference(token_ids)
        self._alone = alone.kv
        self._fresh = alone.fresh
        self._prefix_ids = bank.prefix_ids
        self._question_start = max(span.prompt_end for span in layout.spans)
        self.full = fill(model, replace(layout, spans=()), opener, NonePolicy()).kv
        self.chunks = [
            torch.arange(span.prompt_start, span.prompt_end)
            for span in layout.spans
            if span.prompt_start > len(bank.prefix_ids)
        ]
        self.rows = torch.cat(self.chunks)

    @property
    def layers(self) -> range:
        """The model's layers."""
        return range(self._model.spec.num_layers)

    def kl(self, filled: Filled) -> float:
        """Return KL(full prefill || way) in nats, the mean along full prefill's answer."""
        kv, logits = filled
        kept = self._copy(kv, room=len(self._reference.token_ids))
        found = compare(FullContinuation(self._model, kept), logits, self._reference)
        return sum(found.kl) / len(found.kl)

    def token_ids(self, rows: torch.Tensor) -> list[int]:
        """Return the tokens at some of the prompt's positions."""
        found: list[int] = self._token_ids[rows].tolist()
        return found

    def encoded_after(self, *contexts: Sequence[int]) -> FusedKV:
        """Return KV with chunks encoded after a text, as the mean over several texts."""
        token_ids = [self.token_ids(rows) for rows in self.chunks]
        encoded = [
            self._model.prefill((*self._prefix_ids, *context), token_ids) for context in contexts
        ]
        kv = self._copy(self._alone)
        for rows, *records in zip(self.chunks, *encoded, strict=True):
            keys = torch.stack([record.keys for record in records]).mean(dim=0)
            values = torch.stack([record.values for record in records]).mean(dim=0)
            self._put(kv, rows, keys, values)
        return kv

    def each_encoded_after(self, contexts: Sequence[Sequence[int]]) -> FusedKV:
        """Return KV with each chunk encoded after a separate text."""
        kv = self._copy(self._alone)
        for rows, context in zip(self.chunks, contexts, strict=True):
            (record,) = self._model.prefill((*self._prefix_ids, *context), [self.token_ids(rows)])
            self._put(kv, rows, record.keys, record.values)
        return kv

    def relevance(self, kv: FusedKV) -> torch.Tensor:
        """Return ``[L, n]``: how much the question gathers from each of `rows` in each layer."""
        look = QuestionAttention(self.rows, self._question_start, self.layers)
        self._forward(self._copy(kv), [_NOTHING] * len(self.layers), look)
        return look.relevance

    def recomputed(self, kv: FusedKV, rows: Sequence[torch.Tensor]) -> Filled:
        """Compute rows of chunks again, and all fresh rows.

        Parameters
        ----------
        kv
            The stored KV; it stays as it is.
        rows
            For each layer the positions; each layer's are among those of the layer before.
        """
        filled = self._copy(kv)
        return filled, self._forward(filled, rows)

    def answered(self, kv: FusedKV) -> Filled:
        """Compute the fresh rows alone."""
        return self.recomputed(kv, [_NOTHING] * len(self.layers))

    def replaced(self, kv: FusedKV, rows: Sequence[torch.Tensor], which: str = "kv") -> Filled:
        """Put full prefill's keys (``k``), values (``v``) or both in for each layer's rows."""
        filled = self._copy(kv)
        for layer in self.layers:
            if "k" in which:
                filled.keys[layer][:, :, rows[layer]] = self.full.keys[layer][:, :, rows[layer]]
            if "v" in which:
                filled.values[layer][:, :, rows[layer]] = self.full.values[layer][:, :, rows[layer]]
        return self.answered(filled)

    def spread(self, stored: FusedKV, repaired: FusedKV, rows: torch.Tensor) -> Filled:
        """Add to a chunk's other rows half of the mean change of its recomputed rows.

        The change of a key is that of the position-free key. A chunk of few recomputed rows gets
        less: the mean of m rows counts ``m / (m + 3)``.
        """
        filled = self._copy(repaired)
        for chunk in self.chunks:
            is_new = torch.isin(chunk, rows)
            new, old = chunk[is_new], chunk[~is_new]
            if not len(new) or not len(old):
                continue
            weight = 0.5 * len(new) / (len(new) + 3)
            for layer in self.layers:
                change = self._strip(repaired, layer, new) - self._strip(stored, layer, new)
                moved = self._strip(stored, layer, old) + weight * change.mean(1, keepdim=True)
                self._place(filled, layer, old, moved)
                values, before = repaired.values[layer][0], stored.values[layer][0]
                change = (values[:, new] - before[:, new]).mean(1, keepdim=True)
                filled.values[layer][0][:, old] = before[:, old] + weight * change
        return self.answered(filled)

    def continued(
        self, kv: FusedKV, context: Sequence[int], rows: torch.Tensor, start: int
    ) -> Filled:
        """Compute rows again from layer `start` on, from the hidden states they were encoded with.

        Parameters
        ----------
        kv
            The stored KV; it stays as it is.
        context
            The text that the chunks were encoded after.
        rows
            Positions of the rows, ascending.
        """
        before = [*self._prefix_ids, *context]
        states = []
        for chunk in self.chunks:
            fed = torch.tensor([[*before, *self.token_ids(chunk)]])
            output = self._model.hf(
                input_ids=fed, output_hidden_states=True, use_cache=False, logits_to_keep=1
            )
            states.append(output.hidden_states[start][0][len(before) :])
        entering = torch.cat(states)[torch.isin(self.rows, rows)]
        filled = self._copy(kv)
        with self._model.computing_rows():
            computed = self._fresh
            hidden = self._model.embed(self._token_ids[computed], computed)
            for layer in self.layers:
                if layer == start:
                    order = torch.cat([computed, rows]).argsort()
                    computed = torch.cat([computed, rows])[order]
                    hidden = torch.cat([hidden, entering])[order].contiguous()
                self._model.forward_rows(layer, hidden, RowPass(computed, filled, self._tables))
            return filled, self._model.logits(hidden[-1:])[0]

    def _forward(
        self, kv: FusedKV, rows: Sequence[torch.Tensor], look: QuestionAttention | None = None
    ) -> torch.Tensor:
        with self._model.computing_rows():
            computed = torch.cat([self._fresh, rows[0]]).sort().values
            hidden = self._model.embed(self._token_ids[computed], computed)
            for layer in self.layers:
                kept = torch.isin(computed, torch.cat([self._fresh, rows[layer]]))
                hidden, computed = hidden[kept].contiguous(), computed[kept]
                attending = Attending(observer=look.observer_of(layer) if look else None)
                of = RowPass(computed, kv, self._tables)
                self._model.forward_rows(layer, hidden, of, attending=attending)
            return self._model.logits(hidden[-1:])[0]

    def _copy(self, kv: FusedKV, room: int = 0) -> FusedKV:
        copied = FusedKV(self._model.spec, kv.num_tokens, kv.num_tokens + room)
        for to, given in zip(copied.keys + copied.values, kv.keys + kv.values, strict=True):
            to[:, :, : kv.num_tokens] = given[:, :, : kv.num_tokens]
        return copied

    def free(self, kv: FusedKV) -> torch.Tensor:
        """Return position-free keys, and values, of all chunks' rows: ``[2 * L, H, n, d]``."""
        keys = [self._strip(kv, layer, self.rows) for layer in self.layers]
        values = [kv.values[layer][0][:, self.rows] for layer in self.layers]
        return torch.stack(keys + values)

    def with_free(self, free: torch.Tensor) -> FusedKV:
        """Return KV with keys and values of chunks as `free` returns them."""
        kv = self._copy(self._alone)
        keys, values = free.chunk(2)
        self._put(kv, self.rows, keys, values)
        return kv

    def _put(
        self, kv: FusedKV, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        for layer in self.layers:
            self._place(kv, layer, rows, keys[layer])
            kv.values[layer][0][:, rows] = values[layer]

    def _strip(self, kv: FusedKV, layer: int, rows: torch.Tensor) -> torch.Tensor:
        keys = kv.keys[layer][0][:, rows]
        free = torch.empty_like(keys)
        self._tables[layer].strip(keys, rows, free)
        return free

    def _place(self, kv: FusedKV, layer: int, rows: torch.Tensor, keys: torch.Tensor) -> None:
        placed = torch.empty_like(keys)
        self._tables[layer].place(keys.contiguous(), rows, placed)
        kv.keys[layer][0][:, rows] = placed
