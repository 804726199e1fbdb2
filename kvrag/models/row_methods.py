"""`RowMethods`: the part of `KVModel` that computes selected rows, one layer at a time."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from kvrag.arguments import QUANTISED
from kvrag.kvcache import KVSpec
from kvrag.models.adapter import RowAdapter
from kvrag.models.batch import BatchRow, BatchRows
from kvrag.models.cardlayers import CardLayers, Slots, on_card
from kvrag.models.compiled import CompiledLayers, Description, compile_layers, describe_layers
from kvrag.models.decoders import Model
from kvrag.models.elements import has_global_hooks, state_of
from kvrag.models.families import Family, project_logits
from kvrag.models.rowgraphs import CapturedLayers, CapturedSteps, RowGraphs
from kvrag.models.rows import RowRunner, rows_at_once
from kvrag.models.schemes import Positions
from kvrag.positions.rotary import RotaryTable
from kvrag.process import TurnLock

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LARGE_BYTES = 1 << 20


class RowMethods:
    """The part of `KVModel` that computes rows of a prompt.

    Attributes
    ----------
    rows
        Runs the layers over selected rows.
    """

    decoder: Model
    family: Family
    spec: KVSpec
    _base: Any
    _windows: list[int | None]
    rows: RowRunner
    _positions: Positions
    _captured: CapturedSteps
    _compiled: CompiledLayers | None
    _one_row: list[RotaryTable] | None = None
    # The layers' state when they were described, and for a card what kernels may compute.
    _seen: tuple[object, ...] | None = None
    _described: Description | None = None
    # What layers were compiled to in that state, without copies of their weights.
    _made: CompiledLayers | None = None
    _slots: Slots | None = None
    _graphs: RowGraphs | None = None
    compute: str
    lock: TurnLock

    @property
    def hf(self) -> PreTrainedModel:
        """The model as Transformers' own object."""
        raise NotImplementedError

    @property
    def windows(self) -> list[int | None]:
        """Each layer's sliding window in tokens, None if it sees everything."""
        return self._windows

    @property
    def has_batches(self) -> bool:
        """Whether rows of several prompts can be computed together (`forward_each`)."""
        return not self.family.attends_itself and self.spec.latent is None

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        # A prompt asks a dozen times: without the generators of `parameters`.
        modules: list[nn.Module] = [self.decoder]
        while True:
            module = modules.pop()
            for weight in module._parameters.values():
                if weight is not None:
                    return weight.device
            modules += filter(None, reversed(module._modules.values()))

    @contextmanager
    def computing_rows(
        self, adapter: RowAdapter | None = None, adapted: torch.Tensor | None = None
    ) -> Iterator[None]:
        """Hold the model for calls of its `rows` without gradients.

        Parameters
        ----------
        adapter
            Acts in those calls, on the rows that `adapted` names.
        adapted
            Positions of the adapted rows; None means all.
        """
        with self.rows.computing(adapter, adapted):
            yield

    def tables(self, num_tokens: int, positions: Sequence[int] | None = None) -> list[RotaryTable]:
        """Return each layer's table for rows ``0 .. num_tokens - 1``.

        Parameters
        ----------
        num_tokens
            Number of rows.
        positions
            Position of each row, ascending; None means that row r has position r.
        """
        if positions is None:
            return self._positions.tables(torch.arange(num_tokens, device=self.device))
        return self._positions.tables(torch.tensor(positions, device=self.device))

    def embed(self, token_ids: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """Return the first layer's input ``[n, hidden]`` for token ids ``[n]``.

        Parameters
        ----------
        positions
            ``[n]``; required if the model has learned positions.
        """
        family = self.family
        embedding = self._base.get_input_embeddings()
        norm = getattr(self._base, family.embedding_norm) if family.embedding_norm else None
        learned = (
            getattr(self._base, family.position_embedding) if family.position_embedding else None
        )
        factor = getattr(self._base, "embedding_multiplier", None)
        width = self.decoder.config.hidden_size
        hidden = _scratch(len(token_ids), width, self.spec.dtype, self.device)
        size = rows_at_once(self.device)
        for begin in range(0, len(token_ids), size):
            block = slice(begin, begin + size)
            embedded = embedding(token_ids[block])
            if factor is not None:
                embedded = embedded * factor
            if learned is not None:
                assert positions is not None, "learned positions are part of the input"
                embedded = embedded + learned(positions[block])
            hidden[block] = embedded if norm is None else norm(embedded)
        return hidden

    def begin_answer(self) -> None:
        """Call this before an answer's first `forward_each`: the model may have changed.

        What changes later (hooks, weights that are replaced) counts from the next answer on.
        """
        with self.lock:
            self._captured.check_model()
            if self.device.type == "cpu":
                compiled = self.compile()
                assert not isinstance(compiled, CardLayers)
                self._compiled = compiled

    def compile(self) -> CompiledLayers | CardLayers | None:
        """Return the layers as modules would compute them now, if kernels can.

        Use it for one prompt or answer: what changes later (hooks, weights that are replaced) does
        not count.
        """
        quantised = self.compute if self.compute in QUANTISED else None
        if quantised is None and self.compute != str(self.spec.dtype).removeprefix("torch."):
            return None
        device, tables, layers = self.device, self._any_tables(), self.rows.layers
        is_on_cpu = device.type == "cpu"
        seen = device, has_global_hooks(), *state_of(*layers)
        if seen != self._seen:
            described = describe_layers(layers, self._windows, tables)
            if not is_on_cpu:
                width = tables[0].cos.shape[-1]
                if described is not None and not on_card(described, device, width):
                    described = None
                self._slots = self._graphs = None
                if described is not None:
                    self._slots = Slots(described, device)
                    self._graphs = RowGraphs(described, self._slots, device, self.lock)
            self._described, self._seen, self._made = described, seen, None
        if is_on_cpu:
            made = self._made
            if made is None:
                made = compile_layers(self._described, quantised=quantised)
                # Quantised weights are copies: in-place changes count from the next prompt on.
                self._made = made if quantised is None else None
            return made
        if self._described is None or self._slots is None or self._graphs is None:
            return None
        return CapturedLayers(self._described, self._slots, self._graphs)

    @property
    def lacks_graphs(self) -> bool:
        """Whether prompts would have been faster with layers that are captured as graphs."""
        return self._graphs is not None and self._graphs.wants_more

    def capture_rows(self) -> None:
        """Capture the layers that prompts lacked as graphs: beside prompts, never for one of them.

        After a capture that fails, one warning says so, and everything goes on as before.
        """
        if self._graphs is not None:
            self._graphs.capture()

    def _any_tables(self) -> list[RotaryTable]:
        """Return each layer's table of any positions: made once."""
        if self._one_row is None:
            self._one_row = self.tables(1)
        return self._one_row

    def forward_each(self, token_ids: Sequence[int], rows: Sequence[BatchRow]) -> torch.Tensor:
        """Run all layers over one row of each of B prompts; return logits ``[B, vocabulary]``.

        Each row's K/V are written to its prompt's buffer. Call this inside `computing_rows`, whose
        adapter acts on all rows. Families that attend in their own code have no batches.

        Parameters
        ----------
        token_ids
            The B rows' tokens.
        rows
            Where each row belongs.
        """
        if not self.rows.is_adapted:
            captured = self._captured.find(rows, self._step)
            if captured is not None:
                return captured.run(token_ids, rows)
        ids = torch.tensor(token_ids, device=self.device)
        return self._step(ids, BatchRows(rows, self._windows))

    def _step(self, ids: torch.Tensor, batch: BatchRows) -> torch.Tensor:
        """Return logits ``[B, vocabulary]`` for the batch's tokens ``[B]``."""
        hidden = self.embed(ids, batch.positions)
        tables = self._positions.tables(batch.positions)
        with self.rows.each_row():
            if self._compiled is not None and batch.in_kernel and not self.rows.is_adapted:
                self._compiled.run(hidden, tables, batch)
                return self.logits(hidden)
            # Layers share tables.
            embeddings = {
                id(table): table.embeddings(slice(None), self.spec.dtype) for table in tables
            }
            for layer_index, table in enumerate(tables):
                self.rows.forward_each(layer_index, hidden, batch, embeddings[id(table)])
            return self.logits(hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits ``[n, vocabulary]`` for the last layer's outputs ``[n, hidden]``."""
        norm = getattr(self._base, self.family.final_norm)
        return project_logits(self.decoder, norm(hidden))


def _scratch(num_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return memory for hidden states ``[num_rows, width]``.

    The C allocator would keep it. After one large block is freed, glibc takes later blocks of that
    size from its heap and holds them, beside the fused KV that then fills up.
    """
    num_bytes = num_rows * width * dtype.itemsize
    if device.type != "cpu" or num_bytes < _LARGE_BYTES:
        return torch.empty(num_rows, width, dtype=dtype, device=device)
    memory = mmap.mmap(-1, num_bytes)
    return torch.frombuffer(memory, dtype=dtype).view(num_rows, width)
