"""Generation after a fused prompt, token by token in the prompt's buffer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch

from kvrag.eviction import EvictionReport
from kvrag.eviction.base import EvictionPolicy
from kvrag.fusion.fuser import FusedPrompt
from kvrag.fusion.whole import WholePrompt
from kvrag.models.batch import BatchRow
from kvrag.models.kv_model import KVModel
from kvrag.models.rowgraphs import uses_graphs
from kvrag.models.rows import RowPass
from kvrag.models.writers import CACHE_ARGUMENT
from kvrag.native.linear import MAX_ROWS


class Decoder(Protocol):
    """Computes the tokens after a fused prompt, one at a time."""

    @abstractmethod
    def step(self, token_id: int) -> torch.Tensor:
        """Write a token's KV; return the logits ``[vocabulary]`` of what follows it."""

    def report(self) -> EvictionReport | None:
        """Return what was evicted so far; None if the decoder evicts nothing."""
        return None


def make_decoder(model: KVModel, fused: FusedPrompt, eviction: EvictionPolicy | None) -> Decoder:
    """Return the decoder that continues a prompt.

    Raises
    ------
    ParameterError, UnsupportedModelError
        See `EvictingDecoder`.
    """
    if isinstance(fused, WholePrompt):
        return WholeDecoder(fused)
    if eviction is not None:
        from kvrag.fusion.evicting import EvictingDecoder

        return EvictingDecoder(model, fused, eviction)
    has_gaps = fused.layout.positions is not None
    if not model.has_batches:
        return GapDecoder(model, fused) if has_gaps else CacheDecoder(model, fused)
    if has_gaps or model.device.type == "cpu" or uses_graphs():
        return RowDecoder(model, fused)
    return CacheDecoder(model, fused)


def step_all(steps: Sequence[tuple[Decoder, int]]) -> list[torch.Tensor | Exception]:
    """Step decoders of one model, together where they can.

    Parameters
    ----------
    steps
        Different decoders, and the next token of each.

    Returns
    -------
    list
        For each its logits ``[vocabulary]``, or the error that its own step raised.
    """
    # Other kernels compute rows with an adapter. Beside one, a row would be rounded otherwise than
    # alone.
    together: dict[int, list[int]] = {}
    for number, (decoder, _) in enumerate(steps):
        if isinstance(decoder, RowDecoder):
            together.setdefault(id(decoder.adapter), []).append(number)
    outcomes: dict[int, torch.Tensor | Exception] = {}
    for group in together.values():
        for begin in range(0, len(group), MAX_ROWS):
            numbers = group[begin : begin + MAX_ROWS]
            decoders = [steps[number][0] for number in numbers]
            try:
                logits = RowDecoder.step_each(
                    [one for one in decoders if isinstance(one, RowDecoder)],
                    [steps[number][1] for number in numbers],
                )
            except Exception:  # somebody's fault: alone, it is found out whose
                continue
            outcomes.update(zip(numbers, logits, strict=True))
    for number, (decoder, token_id) in enumerate(steps):
        if number not in outcomes:
            try:
                outcomes[number] = decoder.step(token_id)
            except Exception as error:
                outcomes[number] = error
    return [outcomes[number] for number in range(len(steps))]


class WholeDecoder(Decoder):
    """Continues a prompt that was computed as a whole."""

    def __init__(self, prompt: WholePrompt) -> None:
        self._prompt = prompt

    def step(self, token_id: int) -> torch.Tensor:
        """Write a token's KV; return the logits ``[vocabulary]`` of what follows it."""
        return self._prompt.model.read(self._prompt.state, [token_id])


class CacheDecoder(Decoder):
    """Continues a prompt without gaps in its positions, by means of Transformers.

    Parameters
    ----------
    model
        The model.
    fused
        The prompt.
    """

    def __init__(self, model: KVModel, fused: FusedPrompt) -> None:
        from kvrag.models.caches import FusedCache

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


class RowDecoder(Decoder):
    """Continues a prompt row by row, as the fuser computes rows: on the CPU, in compiled kernels.

    It also continues prompts whose positions have gaps. Transformers derives the positions after a
    cache from the cache's length, and families with ALiBi take no positions at all. Here, new rows
    continue from the prompt's last position.

    Parameters
    ----------
    model
        The model, of a family that attends through Transformers' interface.
    fused
        The prompt. The room left in its buffer limits how many tokens can be decoded.
    """

    def __init__(self, model: KVModel, fused: FusedPrompt) -> None:
        self._model = model
        self.adapter = None if fused.links is None else fused.links.adapter
        num_rows = len(fused.layout.token_ids)
        model.begin_answer()
        self._next = BatchRow(fused.kv, fused.kv.addresses, num_rows, fused.layout.end_position)

    def step(self, token_id: int) -> torch.Tensor:
        """Write a token's KV; return the logits ``[vocabulary]`` of what follows it."""
        return self.step_each([self], [token_id])[0]

    @staticmethod
    def step_each(decoders: Sequence[RowDecoder], token_ids: Sequence[int]) -> torch.Tensor:
        """Step several decoders of one model at once; return logits ``[B, vocabulary]``.

        The logits are those of single steps, bit for bit where kernels on the CPU compute them
        (`MAX_ROWS` at most), without an adapter, and linear layers compute in the type of the
        weights, in int8 or int4.

        Parameters
        ----------
        decoders
            Different ones, with the same adapter or none.
        token_ids
            The next token of each.
        """
        model = decoders[0]._model
        with model.computing_rows(decoders[0].adapter):
            logits = model.forward_each(token_ids, [one._next for one in decoders])
        # Not before: if a step fails, it can be repeated.
        for one in decoders:
            row = one._next
            one._next = replace(row, place=row.place + 1, position=row.position + 1)
        return logits


class GapDecoder(Decoder):
    """Continues a prompt with gaps in its positions, for families that attend in their own code.

    Parameters
    ----------
    model, fused
        See `RowDecoder`.
    """

    def __init__(self, model: KVModel, fused: FusedPrompt) -> None:
        layout = fused.layout
        self._model = model
        self._fused = fused.kv
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
            of = RowPass(row, self._fused, self._tables)
            for layer_index in range(len(self._tables)):
                model.rows.forward(layer_index, hidden, of)
            logits = model.logits(hidden)[0]
        self._num_rows += 1
        return logits
