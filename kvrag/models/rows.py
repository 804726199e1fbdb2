"""Computing selected rows of a prompt with a model's own layers, one layer at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from kvrag.kvcache import FusedKV, KVSpec, packed
from kvrag.models.adapter import RowAdapter, without_adapters
from kvrag.models.attention import (
    AttentionDone,
    AttentionObserver,
    MassObserver,
    RowMask,
    host_rows,
    known_rows,
    lock_of,
    num_before,
    row_attention,
)
from kvrag.models.batch import BatchRows
from kvrag.models.cardlayers import CardLayers, RowsAsked
from kvrag.models.compiled import CompiledLayers
from kvrag.models.decoders import Model
from kvrag.models.families import Family, base_of
from kvrag.models.linears import fast_modules
from kvrag.models.writers import (
    Deviation,
    ProjectionDone,
    ProjectionProbe,
    RowsChanged,
    RowWriter,
    write_rows,
)
from kvrag.positions.rotary import AlibiTable, RotaryTable

# -- attention of models that attend in their own code -------------------------------------------
#
# BLOOM, MPT and Falcon do not use Transformers' attention interface. Selected rows therefore reach
# them as a mask in the shape that their own forward passes to their layers.


def layer_arguments(hf: Model, mask: RowMask, num_keys: int, table: RotaryTable) -> dict[str, Any]:
    """Return a decoder layer's arguments besides hidden states and cache.

    Parameters
    ----------
    mask
        The rows' mask.
    num_keys
        Number of keys that the rows attend to, from the mask's first key on.
    table
        The layer's table, over all rows.
    """
    kind = hf.config.model_type
    allowed = mask.dense(num_keys)[None, None]
    bias = None
    if isinstance(table, AlibiTable):
        bias = table.bias[:, None, mask.first_key : mask.first_key + num_keys]
    if kind == "mpt":
        return {"attention_mask": ~allowed, "position_bias": bias}
    lowest = torch.finfo(hf.dtype).min
    additive = torch.zeros(allowed.shape, dtype=hf.dtype, device=allowed.device)
    additive.masked_fill_(~allowed, lowest)
    if kind == "bloom":
        return {"attention_mask": additive, "alibi": bias}
    arguments: dict[str, Any] = {
        "attention_mask": additive,
        "alibi": None,
        "position_ids": mask.positions[None],
        # The only one of Falcon's code paths that returns its weights.
        "output_attentions": mask.observer is not None,
    }
    if bias is None:
        arguments["position_embeddings"] = table.embeddings(mask.positions, hf.dtype)
        return arguments
    arguments["alibi"] = bias[None]
    if mask.observer is not None and hf.config._attn_implementation == "sdpa":
        # The code that returns its weights adds the bias, which the other code leaves to the mask.
        return arguments
    # Falcon's model folds the bias into the mask, and passes it on separately as well.
    head_dim = hf.config.hidden_size // hf.config.num_attention_heads
    folded = (bias[None] / math.sqrt(head_dim)).expand(-1, -1, allowed.shape[2], -1)
    arguments["attention_mask"] = folded.masked_fill(~allowed, lowest)
    return arguments


def show_weights(
    observer: AttentionObserver, mask: RowMask, weights: torch.Tensor, values: torch.Tensor
) -> None:
    """Show an observer the weights and values that a layer attended with.

    Parameters
    ----------
    weights
        ``[1, heads, n, K]``.
    values
        ``[1, H, C, D]``, the layer's values in the buffer.
    """
    num_kv_heads, num_keys = values.shape[1], weights.shape[3]
    shown = values[0, :, mask.first_key : mask.first_key + num_keys]
    grouped = weights[0].view(num_kv_heads, -1, *weights.shape[2:])
    for head in range(num_kv_heads):
        observer(mask, slice(0, weights.shape[2]), grouped[head].float(), shown[head].float())


# -- rows of a prompt ----------------------------------------------------------------------------

# Rows that a layer computes at once: few enough that a block's MLP activations stay small beside
# the fused KV, many enough that matrix products run at full speed on several threads.
ROW_BLOCK = 512
# On a GPU, starting a layer's kernels takes Python longer than most blocks take the GPU. Plain
# prefill has all rows at once.
_GPU_ROW_BLOCK = 16384


def rows_at_once(device: torch.device) -> int:
    """Return how many rows a layer computes at once, if it has no window."""
    return ROW_BLOCK if device.type == "cpu" else _GPU_ROW_BLOCK


@dataclass(frozen=True)
class Attending:
    """How rows attend to the rows before them.

    Attributes
    ----------
    observer
        Receives every block's queries with the keys and values that they attend to.
    visible
        ``[n, K]`` bool: which of the buffer's first K rows each of the n rows sees. They must
        precede it in the rows or be in the buffer already. None: all rows before it, inside the
        layer's window. If given, rows need not ascend, and the layer's window is ignored.
    stops
        Whether the layer may end after its attention: only what it writes and shows is wanted, and
        the rows' hidden states are not used again.
    changed
        Called with each block of rows once its K/V are written, before they are attended to.
    """

    observer: AttentionObserver | None = None
    visible: torch.Tensor | None = None
    stops: bool = False
    changed: RowsChanged | None = None

    @property
    def in_kernel(self) -> bool:
        """Whether a kernel computes a whole layer of which rows attend so."""
        return (
            (self.observer is None or isinstance(self.observer, MassObserver))
            and self.visible is None
            and self.changed is None
        )


ALL_BEFORE = Attending()


@dataclass(frozen=True, eq=False)
class RowPass:
    """Rows of one prompt, which layers compute one after the other.

    Attributes
    ----------
    rows
        ``[n]`` ascending positions.
    fused
        The prompt's buffer; every position below ``rows[-1]`` holds a layer's K/V before the layer
        runs, or is among `rows`.
    tables
        Each layer's rotary table over all positions.
    compiled
        The layers in kernels (`KVModel.compile`), which few rows are computed by; None: modules do.
    """

    rows: torch.Tensor
    fused: FusedKV
    tables: Sequence[RotaryTable]
    compiled: CompiledLayers | CardLayers | None = None

    def over(self, rows: torch.Tensor) -> RowPass:
        """Return the pass of other rows of the prompt."""
        return self if rows is self.rows else replace(self, rows=rows)

    def part(self, block: slice) -> RowPass:
        """Return the pass of a block of the rows."""
        # The same tensor in each layer, if it can be: its ends are then known.
        is_whole = not block.start and block.stop >= len(self.rows)
        return self if is_whole else self.over(self.rows[block])


class RowRunner:
    """Runs one model's layers over selected rows, inside `KVModel.computing_rows`.

    Parameters
    ----------
    hf, family
        The model.
    spec
        Shape and type of the KV.
    windows
        Each layer's sliding window in tokens, None if it sees everything.
    compute
        What linear layers compute in (`fast_modules`).

    Attributes
    ----------
    is_adapted
        Whether an adapter acts on rows at present.
    """

    def __init__(
        self,
        hf: Model,
        family: Family,
        spec: KVSpec,
        windows: list[int | None],
        compute: str,
    ) -> None:
        self._hf = hf
        self._family = family
        self._spec = spec
        self._windows = windows
        self._compute = compute
        self._layers: Any = getattr(base_of(hf), family.layers)
        self._lock = lock_of(hf)
        # The rows that adapters act on, in the middle of a layer; written under the lock.
        self._at_hand = torch.empty(0, dtype=torch.long)
        self.is_adapted = False

    @property
    def layers(self) -> Sequence[nn.Module]:
        """The model's decoder layers."""
        found: Sequence[nn.Module] = self._layers
        return found

    @contextmanager
    def computing(self, adapter: RowAdapter | None, adapted: torch.Tensor | None) -> Iterator[None]:
        """Hold the model without gradients (`KVModel.computing_rows`)."""
        seen: torch.Tensor | None = None
        chosen: torch.Tensor | None = None

        def gate() -> torch.Tensor | None:
            # Every linear layer asks for it: computed once for each block of rows.
            nonlocal seen, chosen
            if seen is not self._at_hand and adapted is not None:
                seen = self._at_hand
                chosen = torch.isin(seen, adapted)
                if bool(chosen.all()):
                    chosen = None
            return chosen

        acting = without_adapters(self._hf) if adapter is None else adapter.acting(self._hf, gate)
        with self._lock, torch.no_grad(), acting, self._outer():
            before, self.is_adapted = self.is_adapted, adapter is not None
            try:
                yield
            finally:
                self.is_adapted = before

    def _outer(self, *, each_row: bool = False) -> AbstractContextManager[None]:
        """Let modules outside the layers use kernels: a layer's own ones are switched with it."""
        return fast_modules(self._hf, self._compute, each_row=each_row, besides=self._layers)

    def _attending(self) -> AbstractContextManager[None]:
        """Let layers take masks of rows."""
        # Families that attend in their own code have no other implementation.
        return nullcontext() if self._family.attends_itself else row_attention(self._hf)

    @contextmanager
    def each_row(self) -> Iterator[None]:
        """Compute rows of different prompts as each would be computed alone."""
        with self._outer(each_row=True), self._attending():
            yield

    def forward(
        self,
        layer_index: int,
        hidden: torch.Tensor,
        of: RowPass,
        *,
        attending: Attending = ALL_BEFORE,
        deviation: Deviation | None = None,
        writes: bool = True,
    ) -> None:
        """Run one layer over selected rows; their K/V replace the buffer's.

        Row i attends to every row j <= i of the buffer inside the layer's window, recomputed or
        reused.

        Parameters
        ----------
        layer_index
            Index of the layer.
        hidden
            ``[n, hidden]`` inputs of the rows; replaced by the layer's outputs.
        of
            The rows, and the prompt that they are of.
        attending
            How the rows attend, if not as described above.
        deviation
            Filled with the distances of the n rows' fresh K/V from the K/V they replace.
        writes
            False leaves the buffer as it is; it must then hold the rows' own K/V already.
        """
        window, table = self._windows[layer_index], of.tables[layer_index]
        fused, compiled = of.fused, of.compiled
        observer, visible = attending.observer, attending.visible
        if not (writes and deviation is None and attending.in_kernel) or self.is_adapted:
            compiled = None
        if isinstance(compiled, CardLayers):
            sums = isinstance(observer, MassObserver) and observer.taken is not None
            if observer is None or sums:
                self._on_card(compiled, layer_index, hidden, of, attending)
                return
            compiled = None
        if attending.stops:
            compiled = None
        # Rows are ascending, so an earlier block never sees a later block's K/V.
        for block, positions, first_key, last in self._blocks(layer_index, of.rows):
            if compiled is not None and compiled.can_run(len(positions)):
                shown = slice(first_key, last + 1)
                keys, values = fused.keys[layer_index][0], fused.values[layer_index][0]
                known = known_rows(positions)
                mask = RowMask(positions, first_key, window, observer, known=known)
                with mask.noting(values[:, shown]) as mass:
                    kv = keys[:, shown], values[:, shown]
                    compiled.run_rows(layer_index, hidden[block], mask, kv, table, mass)
                continue
            seen = None
            if visible is not None:
                seen, first_key, last, window = visible[block], 0, visible.shape[1] - 1, None
            noted = None if deviation is None else deviation[block]
            shown = slice(first_key, last + 1)
            writer = RowWriter(fused, positions, shown, noted, writes, attending.changed)
            mask = RowMask(
                positions,
                first_key,
                window,
                observer,
                seen,
                stops=attending.stops,
                is_square=window is None and first_key == 0 and last + 1 == len(positions),
                known=known_rows(positions),
            )
            try:
                output = self._run(
                    layer_index, hidden[block], mask, last + 1 - first_key, table, writer
                )
            except AttentionDone:
                continue
            if isinstance(output, tuple):
                if observer is not None and self._family.attends_itself:
                    show_weights(observer, mask, output[1], fused.values[layer_index])
                output = output[0]
            hidden[block] = output[0]

    def _on_card(
        self,
        compiled: CardLayers,
        layer_index: int,
        hidden: torch.Tensor,
        of: RowPass,
        attending: Attending,
        *,
        only_writes: bool = False,
    ) -> None:
        """Run one layer over rows by a card's kernels."""
        rows = of.rows
        known, size = known_rows(rows), compiled.most_rows
        if known.last is not None and len(rows) <= size:
            blocks = [(rows, known.last)]
        else:
            if size not in known.blocks:
                # Copies: what is known of rows must not keep them alive.
                ends = enumerate(ends_of(rows, size))
                known.blocks[size] = [
                    (rows[number * size : (number + 1) * size].clone(), last)
                    for number, (_, last) in ends
                ]
            blocks = known.blocks[size]
        for number, (some, last) in enumerate(blocks):
            block = slice(number * size, (number + 1) * size)
            asked, observer = None, attending.observer
            if isinstance(observer, MassObserver) and observer.taken is not None:
                first = num_before(rows, observer.first_position) - block.start
                asked = RowsAsked(*observer.taken, max(0, first))
            prepared = compiled.prepare(some, of.fused, of.tables[layer_index], last, asked)
            compiled.run_rows(
                layer_index,
                hidden[block],
                prepared,
                stops=attending.stops,
                only_writes=only_writes,
            )

    def write(
        self,
        layer_index: int,
        hidden: torch.Tensor,
        of: RowPass,
        *,
        changed: RowsChanged | None = None,
    ) -> None:
        """Write one layer's fresh K/V of rows to the buffer, without attention and MLP.

        Parameters
        ----------
        layer_index, hidden, of
            As in `forward`; `hidden` stays as it is.
        changed
            See `Attending`.
        """
        rows, fused, compiled = of.rows, of.fused, of.compiled
        is_plain = changed is None and not self.is_adapted
        if isinstance(compiled, CardLayers) and is_plain:
            self._on_card(compiled, layer_index, hidden, of, ALL_BEFORE, only_writes=True)
            return
        which = torch.arange(len(rows), device=rows.device)
        into = fused.keys[layer_index][0], fused.values[layer_index][0]
        for block, keys, values in self.project(layer_index, hidden, of, which):
            write_rows(*into, rows[block], keys, values, changed)

    def forward_each(
        self,
        layer_index: int,
        hidden: torch.Tensor,
        batch: BatchRows,
        embeddings: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """Run one layer over a row of each prompt of a batch (`KVModel.forward_each`)."""
        layer = self._layers[layer_index]
        with fast_modules(layer, self._compute, each_row=True):
            output = layer(
                hidden[None],
                attention_mask=batch,
                position_ids=batch.positions[None],
                position_embeddings=embeddings,
                **{self._family.cache_argument: batch},
            )
        hidden.copy_((output[0] if isinstance(output, tuple) else output)[0])

    def project(
        self,
        layer_index: int,
        hidden: torch.Tensor,
        of: RowPass,
        which: torch.Tensor,
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield one layer's fresh K/V for some of the rows, without its attention and MLP.

        Parameters
        ----------
        layer_index, hidden, of
            As in `forward`; nothing is changed.
        which
            ``[m]`` indices into the rows.

        Yields
        ------
        tensor, tensor, tensor
            A block of `which`, 512 at most, and the placed keys and the values ``[H, m, D]`` of its
            rows.
        """
        for block in torch.split(which, ROW_BLOCK):
            mask, table = RowMask(of.rows[block], 0, None), of.tables[layer_index]
            try:
                self._run(layer_index, hidden[block], mask, 0, table, ProjectionProbe())
            except ProjectionDone as done:
                keys, values = packed(self._spec.latent, done.keys, done.values)
                yield block, keys[0], values[0]

    def _blocks(
        self, layer_index: int, rows: torch.Tensor
    ) -> Iterator[tuple[slice, torch.Tensor, int, int]]:
        """Yield blocks of rows: their indices, their positions, the first and last key seen."""
        window = self._windows[layer_index]
        size = self._block_size(window, rows.device)
        for number, (first, last) in enumerate(ends_of(rows, size)):
            first_key = 0 if window is None else max(0, first - window + 1)
            block = slice(number * size, number * size + size)
            # The same tensor in each layer, if it can be.
            yield block, rows[block] if len(rows) > size else rows, first_key, last

    def _block_size(self, window: int | None, device: torch.device) -> int:
        """Return how many rows a layer computes at once."""
        if device.type == "cpu":
            return ROW_BLOCK
        attention = str(self._hf.config._attn_implementation)
        if self._family.attends_itself or attention.endswith("eager"):
            return ROW_BLOCK  # the scores of all rows of a block exist
        # A block's rows see the keys of all its windows.
        return _GPU_ROW_BLOCK if window is None else min(_GPU_ROW_BLOCK, max(ROW_BLOCK, window))

    def _run(
        self,
        layer_index: int,
        hidden: torch.Tensor,
        mask: RowMask,
        num_keys: int,
        table: RotaryTable,
        cache: RowWriter | ProjectionProbe,
    ) -> Any:
        """Return what a layer's own forward returns for a block of rows ``[n, hidden]``."""
        self._at_hand = mask.positions
        layer = self._layers[layer_index]
        with self._attending(), fast_modules(layer, self._compute):
            return layer(
                hidden[None],
                **self._arguments(mask, num_keys, table),
                **{self._family.cache_argument: cache},
            )

    def _arguments(self, mask: RowMask, num_keys: int, table: RotaryTable) -> dict[str, Any]:
        """Return a layer's arguments for a block of rows, besides their hidden states."""
        if self._family.attends_itself:
            return layer_arguments(self._hf, mask, num_keys, table)
        embeddings, position_ids = self._embeddings(mask.positions, table)
        return {
            "attention_mask": mask,
            "position_ids": position_ids,
            "position_embeddings": embeddings,
        }

    def _embeddings(self, rows: torch.Tensor, table: RotaryTable) -> tuple[Any, torch.Tensor]:
        """Return what layers take for a block's positions, once for all that share a table."""
        known = known_rows(rows)
        if id(table) not in known.embeddings:
            # A row's position is not its number, where a prompt has gaps.
            ids = rows if table.positions is None else table.positions[rows]
            # A copy: a view would keep the rows alive, and with them what is known of them.
            copied = ids[None].clone()
            known.embeddings[id(table)] = table, table.embeddings(rows, self._spec.dtype), copied
        _, embeddings, position_ids = known.embeddings[id(table)]
        return embeddings, position_ids


def ends_of(rows: torch.Tensor, size: int) -> list[tuple[int, int]]:
    """Return the first and last row of each block. If rows are not known, this waits for a GPU."""
    numbers = host_rows(rows).numpy()
    blocks = (numbers[begin : begin + size] for begin in range(0, len(numbers), size))
    return [(int(block[0]), int(block[-1])) for block in blocks]
