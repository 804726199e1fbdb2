"""A model's layers on a graphics card, over chosen rows of one prompt: a dozen launches each.

Products are torch's, everything else is `kvrag.native.gpu.rows`. What differs between prompts is in
a small tensor on the card that kernels read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from kvrag.kvcache import FusedKV
from kvrag.models.compiled import (
    HIDDEN,
    Attention,
    Description,
    Gate,
    Linear,
    Operation,
    RowNorm,
)
from kvrag.native.gpu import tiled
from kvrag.native.gpu.compiling import free_bytes
from kvrag.native.gpu.rows import (
    MOST_SPLITS,
    MOST_TABLES,
    RowKernels,
    RowOperations,
    RowPlaces,
    RowTensors,
)
from kvrag.positions.rotary import RotaryTable

MOST_ROWS = 4096
"""Rows that a layer computes at once: with more, what is between operations takes gigabytes."""
_FEWEST_ROWS = 512
_FREE_SHARE = 32
"""The part of a card's free memory that slots take, unless so few rows fit in it."""

# Kernels read rows by this many numbers.
_ALIGNED = 16
# What is tried before kernels are used.
_CHECKED_TOKENS, _CHECKED_ROWS = 300, 40


def on_card(description: Description, device: torch.device, num_rotated: int) -> bool:
    """Return whether kernels of a card can compute described layers.

    Parameters
    ----------
    num_rotated
        Channels of a head that positions rotate.
    """
    if num_rotated != description.head_dim or len(description.tables) > MOST_TABLES:
        return False
    if any(width % _ALIGNED for width in description.widths.values()):
        return False
    if not all(
        one.device == device
        and one.dtype == description.dtype
        and one.is_contiguous()
        # Kernels compiled ahead of time read 16 bytes at once.
        and one.data_ptr() % 16 == 0
        for one in _weights(description)
    ):
        return False
    return are_ready(description, device) and is_right(description, device)


def are_ready(description: Description, device: torch.device) -> bool:
    """Return whether all kernels of described layers can be started."""
    wanted: list[tuple[str, dict[str, int]]] = []
    head = {"D": description.head_dim}
    for one in description.layers[0]:
        if isinstance(one, Gate):
            wanted.append(("gated", {"GELU": int(one.is_gelu)}))
        elif isinstance(one, RowNorm):
            wanted.append(("norm", {"ADDS_ONE": int(one.norm.adds_one), "ADDS": int(one.adds)}))
        elif isinstance(one, Attention):
            norms, capped = one.norms, head | {"SOFTCAP": int(bool(one.scores.softcap))}
            adds_one = int(norms is not None and norms[0].adds_one)
            own = {"NORMS": int(norms is not None), "ADDS_ONE": adds_one}
            wanted += [("rotate", head | own), ("mass", capped)]
            wanted += [("attend", capped | {"WHOLE": whole}) for whole in (0, 1)]
    return description.head_dim & (description.head_dim - 1) == 0 and all(
        tiled.is_ready(name, description.dtype, device, **constants) for name, constants in wanted
    )


def _weights(description: Description) -> Iterator[torch.Tensor]:
    """Yield the weights of all layers."""
    for layer in description.layers:
        for one in layer:
            if isinstance(one, Linear):
                yield one.layer.weight
            elif isinstance(one, RowNorm):
                yield one.norm.weight
            elif isinstance(one, Attention) and one.norms is not None:
                yield from (norm.weight for norm in one.norms)


def is_right(description: Description, device: torch.device) -> bool:
    """Return whether kernels compute a layer as PyTorch does here; tried once for each kind."""
    layer = description.layers[0]
    # What decides which kernels run, and how they are compiled.
    kinds = tuple(
        (one.norms is None, bool(one.scores.softcap))
        if isinstance(one, Attention)
        else (type(one).__name__, getattr(one, "is_gelu", None), getattr(one, "adds", None))
        for one in layer
    )
    return tiled.is_trusted(
        "rows",
        description.dtype,
        device,
        description.head_dim,
        description.num_heads,
        kinds,
        error=lambda: difference(description, device),
    )


@torch.no_grad()
def difference(description: Description, device: torch.device) -> float:
    """Return how far kernels are from PyTorch in the first layer over rows of some prompt.

    That is the largest of the distances of hidden states, keys, values and mass, each as a share of
    its length: for few rows, whose keys are split, and for as many as are not.
    """
    results = []
    unsplit = partial(operations_for, most_splits=1)
    for make in (operations_for, unsplit, lambda places, _: RowTensors(places)):
        places, hidden = sample(description, device)
        places.mass = torch.zeros(1, _CHECKED_TOKENS, device=device)
        slots = Slots(description, device).of(_CHECKED_ROWS) | {HIDDEN: hidden}
        prepared = Prepared(
            description, make(places, description), slots, looks_from=0, has_tables=True
        )
        prepared.run(0, description.layers[0])
        results.append((hidden, *places.keys, *places.values, places.mass))
    *found, expected = results
    return max(tiled.distance(*pair) for one in found for pair in zip(one, expected, strict=True))


def sample(description: Description, device: torch.device) -> tuple[RowPlaces, torch.Tensor]:
    """Return rows of some prompt with the K/V of a layer, and their inputs: always the same."""
    made = torch.Generator().manual_seed(0)
    num_given, head_dim = description.num_heads[1], description.head_dim
    rows = torch.randperm(_CHECKED_TOKENS, generator=made)[:_CHECKED_ROWS].sort().values
    angles = torch.randn(_CHECKED_TOKENS, head_dim // 2, generator=made).repeat(1, 2).to(device)
    shape = (2, num_given, _CHECKED_TOKENS, head_dim)
    keys, values = torch.randn(shape, generator=made).to(device, description.dtype)
    given = torch.randn(_CHECKED_ROWS, description.widths[HIDDEN], generator=made)
    places = RowPlaces(
        rows.to(device),
        _CHECKED_ROWS,
        [(angles.cos(), angles.sin())],
        keys[None],
        values[None],
        int(rows[-1]),
        first_counted=_CHECKED_ROWS // 2,
    )
    return places, given.to(device, description.dtype)


def operations_for(
    places: RowPlaces, description: Description, most_splits: int = MOST_SPLITS
) -> RowOperations:
    """Return what carries operations out over rows; their state goes to the card."""
    positions, device = places.positions, places.positions.device
    if positions.data_ptr() % 16:
        # The last of many rows, for example. Kernels take aligned addresses, or are built again.
        positions = positions.clone()
    return kernels_over(positions, brought(places.state(), device), description, most_splits)


def kernels_over(
    positions: torch.Tensor,
    state: torch.Tensor,
    description: Description,
    most_splits: int = MOST_SPLITS,
) -> RowOperations:
    """Return what carries operations out over the rows that `positions` and `state` say then."""
    return RowKernels(positions, state, description.dtype, description.num_heads, most_splits)


def brought(numbers: list[int], device: torch.device) -> torch.Tensor:
    """Bring numbers to a card without a wait."""
    there = torch.tensor(numbers, pin_memory=device.type == "cuda")
    return there.to(device, non_blocking=True)


class Slots:
    """Memory for rows between operations. All prompts of a model use it, one after the other.

    Parameters
    ----------
    description
        The layers.
    device
        The card.

    Attributes
    ----------
    most_rows
        Rows that fit at most: `MOST_ROWS`, or fewer where memory is short. For layers of 8 billion
        weights, 4,096 rows take about 420 MB.
    """

    def __init__(self, description: Description, device: torch.device) -> None:
        self._widths, self._dtype, self._device = description.widths, description.dtype, device
        self._made: dict[str, torch.Tensor] = {}
        self._num_rows = 0
        self._stream: torch.cuda.Stream | None = None
        self.most_rows = MOST_ROWS
        if device.type == "cuda":
            room = free_bytes(device)[0] // _FREE_SHARE
            of_row = sum(self._widths.values()) * self._dtype.itemsize
            while self.most_rows > _FEWEST_ROWS and self.most_rows * of_row > room:
                self.most_rows //= 2

    def follow(self) -> None:
        """Let what is started next wait for those who used the slots before on another stream."""
        if self._device.type != "cuda":
            return
        stream = torch.cuda.current_stream(self._device)
        if self._stream is not None and self._stream != stream:
            stream.wait_stream(self._stream)
        self._stream = stream

    def of(self, num_rows: int) -> dict[str, torch.Tensor]:
        """Return the slots of some rows. Earlier ones stay valid."""
        if num_rows > self._num_rows:
            self._made, self._num_rows = {}, 0  # even if there is no memory
            with torch.inference_mode(False):  # they outlive the caller's
                self._made = {
                    name: torch.empty(num_rows, width, dtype=self._dtype, device=self._device)
                    for name, width in self._widths.items()
                }
            self._num_rows = num_rows
        return {name: made[:num_rows] for name, made in self._made.items()}

    def reserve(self) -> int:
        """Take memory for as many rows as fit, and return their number."""
        self.follow()  # another stream may still use the memory that this frees
        while True:
            try:
                self.of(self.most_rows)
            except torch.OutOfMemoryError:
                if self.most_rows == 1:
                    raise
                self.most_rows //= 2
            else:
                return self.most_rows


@dataclass(frozen=True)
class RowsAsked:
    """What a look notes of some rows: `RowPlaces.mass` and its first row that counts.

    Attributes
    ----------
    mass
        ``[M, N]`` float32: for each layer of `layers` what each key gets, to be added to.
    first_layer
        The layer of its first row.
    first_counted
        The first of the rows that counts.
    """

    mass: torch.Tensor
    first_layer: int
    first_counted: int


class CardLayers:
    """A model's layers, for rows of one prompt on a card.

    Parameters
    ----------
    description
        The layers, whose weights are on the card.
    slots
        Memory that prompts share; None: its own.

    Attributes
    ----------
    description
        The layers.
    """

    def __init__(self, description: Description, slots: Slots | None = None) -> None:
        self.description = description
        self._slots = slots
        self._prepared: dict[tuple[int, ...], Prepared] = {}

    @property
    def most_rows(self) -> int:
        """Rows that a layer computes at once: fewer once memory has turned out to be short."""
        return MOST_ROWS if self._slots is None else self._slots.most_rows

    def is_like(self, other: CardLayers) -> bool:
        """Return whether these layers and others are the same, in the same memory."""
        return self.description is other.description and self._slots is other._slots

    def slots_of(self, num_rows: int) -> dict[str, torch.Tensor]:
        """Return slots of some rows, which the next call, and the next layer, overwrites."""
        if self._slots is None:
            self._slots = Slots(self.description, next(_weights(self.description)).device)
        self._slots.follow()
        return self._slots.of(num_rows)

    def run_rows(
        self,
        layer_index: int,
        hidden: torch.Tensor,
        prepared: Prepared,
        *,
        stops: bool = False,
        only_writes: bool = False,
    ) -> None:
        """Replace a layer's inputs ``[n, hidden]`` by its outputs, for rows of one prompt.

        Parameters
        ----------
        layer_index
            The layer.
        prepared
            What `prepare` returns for the rows.
        stops
            Whether the layer ends once its attention is noted.
        only_writes
            Whether the layer ends once K/V are written.
        """
        if self._slots is not None:
            self._slots.follow()
        prepared.slots[HIDDEN] = hidden
        operations = self.description.layers[layer_index]
        prepared.run(layer_index, operations, only_writes=only_writes, stops=stops)

    def prepare(
        self,
        rows: torch.Tensor,
        fused: FusedKV,
        table: RotaryTable,
        last: int,
        asked: RowsAsked | None,
    ) -> Prepared:
        """Return slots and state for rows, which all layers share.

        Parameters
        ----------
        rows
            ``[n]`` ascending positions, on the card. Give the same tensor in each layer.
        fused
            The prompt's buffer; the rows' own K/V are written there.
        table
            The layer's table of all positions.
        last
            The last row.
        asked
            What to note of the rows' attention; None: nothing.
        """
        key = id(rows), id(fused), id(table), 0 if asked is None else id(asked.mass)
        known = self._prepared.get(key)
        if known is None:
            places = places_of(rows, fused, [table], last, asked)
            known = self._prepared[key] = Prepared(
                self.description,
                operations_for(places, self.description),
                self.slots_of(len(rows)),
                looks_from=None if asked is None else asked.first_layer,
                kept=(places, fused, table),
            )
        return known


def places_of(
    rows: torch.Tensor,
    fused: FusedKV,
    tables: Sequence[RotaryTable],
    last: int,
    asked: RowsAsked | None,
) -> RowPlaces:
    """Return what kernels read of some rows."""
    keys, values = fused.layers
    angles = [(table.cos.contiguous(), table.sin.contiguous()) for table in tables]
    places = RowPlaces(rows, len(rows), angles, keys, values, last)
    if asked is not None:
        places.mass, places.first_mass = asked.mass, asked.first_layer
        places.first_counted = asked.first_counted
    return places


class Prepared:
    """Slots and state for some rows of a prompt.

    Parameters
    ----------
    operations
        What carries operations out over the rows.
    slots
        `Slots.of` the rows.
    looks_from
        The first layer whose attention is noted; None: no layer's is.
    has_tables
        Whether `operations` know all tables of the model, or the one of this layer.
    kept
        What has to stay alive.
    """

    def __init__(
        self,
        description: Description,
        operations: RowOperations,
        slots: dict[str, torch.Tensor],
        *,
        looks_from: int | None,
        has_tables: bool = False,
        kept: object = None,
    ) -> None:
        self._kept, self._looks_from, self._has_tables = kept, looks_from, has_tables
        self.description = description
        self._head_dim = description.head_dim
        self._operations = operations
        self.slots = dict(slots)

    def run(
        self,
        layer_index: int,
        operations: Sequence[Operation],
        *,
        only_writes: bool = False,
        stops: bool = False,
    ) -> None:
        """Carry out a layer's operations, or those up to its attention."""
        for operation in operations:
            if isinstance(operation, Attention):
                self.attend(layer_index, operation, only_writes=only_writes)
                if only_writes or stops:
                    return
            else:
                self.carry_out(operation)

    def carry_out(self, operation: Linear | RowNorm | Gate) -> None:
        """Carry out an operation of rows that does not look at the prompt."""
        slots = self.slots
        if isinstance(operation, Gate):
            self._operations.gated(slots["gate"], slots["up"], slots["gate"], operation.is_gelu)
        elif isinstance(operation, RowNorm):
            source, to = slots[operation.source], slots[operation.to]
            self._operations.norm(source, operation.norm, to, adds=operation.adds)
        else:
            product(operation, slots[operation.source], slots[operation.to])

    def attend(
        self,
        layer_index: int,
        operation: Attention,
        *,
        only_writes: bool = False,
    ) -> None:
        """Write the rows' K/V, and attend."""
        slots, scores = self.slots, operation.scores
        qkv = slots["query"], slots["key"], slots["value"]
        table = operation.table if self._has_tables else 0
        self._operations.rotate(qkv, operation.norms, layer_index, table, self._head_dim)
        if only_writes:
            return
        query, gathered = slots["query"], slots["gathered"]
        self._operations.attend(query, gathered, layer_index, scores, self._head_dim)
        if self._looks_from is not None and layer_index >= self._looks_from:
            self._operations.mass(query, layer_index, scores, self._head_dim)


def run_together(
    layers: range, over: Prepared, each_of: Callable[[int], Iterable[Prepared]]
) -> None:
    """Carry layers out over rows of several prompts.

    Parameters
    ----------
    over
        All rows, for what does not look at the prompts.
    each_of
        Returns the rows of each prompt, in views of the same slots, for a layer.
    """
    for layer_index in layers:
        for operation in over.description.layers[layer_index]:
            if isinstance(operation, Attention):
                for one in each_of(layer_index):
                    one.attend(layer_index, operation)
            else:
                over.carry_out(operation)


def product(operation: Linear, source: torch.Tensor, to: torch.Tensor) -> None:
    """Carry out a linear layer in one product, rounded once."""
    weight, bias = operation.layer.weight.T, operation.layer.bias
    if operation.adds:
        to.addmm_(source, weight)
        if bias is not None:
            to += bias
    elif bias is None:
        torch.mm(source, weight, out=to)
    else:
        torch.addmm(bias, source, weight, out=to)
