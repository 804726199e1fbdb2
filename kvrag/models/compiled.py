"""A model's layers as lists of operations, and what carries them out on the CPU: one call.

Only layers of Transformers whose arithmetic is written down here are described so. They are known
by name and by their parts. `kvrag.models.cardlayers` carries the same lists out on a graphics card.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from kvrag.errors import ParameterError
from kvrag.models.attention import RowMask
from kvrag.models.batch import BatchRows
from kvrag.models.decoders import MLP, DecoderLayer, RMSNorm
from kvrag.models.elements import (
    ACTIVATIONS,
    HOME,
    KINDS,
    NORMS,
    Kind,
    has_global_hooks,
    is_replaced,
)
from kvrag.models.linears import most_rows, quantised_layer
from kvrag.models.quantised import is_plain
from kvrag.models.small import SmallLinear
from kvrag.native.attention import Mass, Scores
from kvrag.native.gpu.rows import Norm
from kvrag.native.kernels import IS_COMPILED
from kvrag.native.linear import RowLayers
from kvrag.positions.rotary import RotaryTable

_LAYER = "DecoderLayer"
_ATTENTION_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP_LINEARS = ("gate_proj", "up_proj", "down_proj")


class Linear(NamedTuple):
    """A linear layer from one slot to another; with `adds`, what it makes is added there."""

    layer: nn.Linear
    source: str
    to: str
    adds: bool = False


class RowNorm(NamedTuple):
    """A norm of rows from one slot to another; with `adds`, what it makes is added there."""

    norm: Norm
    source: str
    to: str
    adds: bool = False


class Attention(NamedTuple):
    """Norm queries and keys, rotate both, write keys and values, and attend: to "gathered"."""

    norms: tuple[Norm, Norm] | None
    table: int
    scores: Scores


class Gate(NamedTuple):
    """The activation of "gate" times "up", into "gate"."""

    is_gelu: bool


Operation = Linear | RowNorm | Attention | Gate
HIDDEN = "hidden"
"""The slot of a layer's inputs and outputs."""


@dataclass(frozen=True)
class Description:
    """A model's layers as operations on slots: rows of numbers, of one width each.

    Attributes
    ----------
    layers
        For each layer its operations, in order.
    widths
        The width of each slot.
    head_dim, num_heads
        D, and the numbers of query heads and of key heads.
    dtype
        The type of weights and slots.
    tables
        For each table the first layer that uses it.
    """

    layers: tuple[tuple[Operation, ...], ...]
    widths: Mapping[str, int]
    head_dim: int
    num_heads: tuple[int, int]
    dtype: torch.dtype
    tables: tuple[int, ...]


def describe_layers(
    layers: Sequence[nn.Module],
    windows: Sequence[int | None],
    tables: Sequence[RotaryTable],
) -> Description | None:
    """Return a model's layers as operations; None if only their modules can compute them.

    Parameters
    ----------
    layers
        The model's decoder layers, as they are now. A later hook, adapter or exchange of weights
        does not count.
    windows
        Each layer's sliding window in tokens, None if it sees everything.
    tables
        Each layer's table of any positions; layers share tables.
    """
    if not all(table.is_plain for table in tables):
        return None
    if not len(layers) == len(windows) == len(tables) or has_global_hooks():
        return None
    if not all(map(is_known, layers)):
        return None
    numbers: dict[int, int] = {}
    for table in tables:
        numbers.setdefault(id(table), len(numbers))
    ids = list(map(id, tables))
    first: Any = layers[0]
    attention, mlp = first.self_attn, first.mlp
    asked, given = attention.q_proj.out_features, attention.k_proj.out_features
    width = attention.q_proj.in_features
    head_dim: int = attention.head_dim
    kind = _kind_of(first)
    assert kind is not None
    widths = {
        **dict.fromkeys((HIDDEN, "normed", "moved"), width),
        **dict.fromkeys(("query", "gathered"), asked),
        **dict.fromkeys(("key", "value"), given),
        **dict.fromkeys(("gate", "up"), mlp.gate_proj.out_features),
    }
    try:
        described = tuple(
            tuple(_operations(layer, window, numbers[id(table)], width))
            for layer, window, table in zip(layers, windows, tables, strict=True)
        )
    except ParameterError:
        return None
    return Description(
        described,
        widths,
        head_dim,
        (asked // head_dim, given // head_dim),
        getattr(first, kind.norms[0]).weight.dtype,
        tuple(ids.index(one) for one in numbers),
    )


def _operations(layer: Any, window: int | None, table: int, width: int) -> Iterator[Operation]:
    kind = _kind_of(layer)
    assert kind is not None
    attention, mlp = layer.self_attn, layer.mlp
    norms = [_norm_of(getattr(layer, name), width) for name in kind.norms]
    before, after = kind.around(norms)
    yield RowNorm(before[0], HIDDEN, "normed")
    for linear, slot in (("q_proj", "query"), ("k_proj", "key"), ("v_proj", "value")):
        yield Linear(getattr(attention, linear), "normed", slot)
    head_norms = None
    if kind.head_norms:
        one, other = (
            _norm_of(norm, attention.head_dim) for norm in (attention.q_norm, attention.k_norm)
        )
        head_norms = one, other
    softcap = (attention.attn_logit_softcapping if kind.caps else None) or 0.0
    yield Attention(head_norms, table, Scores(attention.scaling, softcap, window))
    yield from _added(attention.o_proj, "gathered", after[0])
    yield RowNorm(before[1], HIDDEN, "normed")
    yield Linear(mlp.gate_proj, "normed", "gate")
    yield Linear(mlp.up_proj, "normed", "up")
    is_gelu = mlp.is_gelu if isinstance(mlp, MLP) else ACTIVATIONS[type(mlp.act_fn).__name__]
    yield Gate(is_gelu)
    yield from _added(mlp.down_proj, "gate", after[1])


def _added(linear: nn.Linear, source: str, norm: Norm | None) -> Iterator[Operation]:
    """Add what a linear layer makes, or a norm of it, to the rows."""
    if norm is None:
        yield Linear(linear, source, HIDDEN, adds=True)
    else:
        yield Linear(linear, source, "moved")
        yield RowNorm(norm, "moved", HIDDEN, adds=True)


def _norm_of(module: Any, width: int) -> Norm:
    is_own = isinstance(module, RMSNorm)
    adds_one, epsilon = (module.adds_one, "epsilon") if is_own else NORMS[type(module).__name__]
    if module.weight.shape != (width,):
        raise ParameterError(f"weight: expected {width}, found {list(module.weight.shape)}")
    return Norm(module.weight, getattr(module, epsilon), adds_one)


def compile_layers(
    description: Description | None, *, quantised: str | None
) -> CompiledLayers | None:
    """Return described layers for the CPU; None if only their modules can compute them.

    Parameters
    ----------
    quantised
        What linear layers compute in, as their weights are now: one of `QUANTISED`; None takes the
        type of the weights.
    """
    if not IS_COMPILED or description is None:
        return None
    try:
        return CompiledLayers(description, quantised=quantised)
    except ParameterError:
        return None  # weights of another type, or in another order


def _kind_of(layer: nn.Module) -> Kind | None:
    if isinstance(layer, DecoderLayer):
        return layer.kind
    return KINDS.get(type(layer).__name__.removesuffix(_LAYER))


def is_known(layer: nn.Module) -> bool:
    """Return whether a layer is made of exactly the modules that are known here."""
    if type(layer) is DecoderLayer:
        return not any(map(is_replaced, layer.modules()))
    family, kind = type(layer).__name__.removesuffix(_LAYER), _kind_of(layer)
    if kind is None or type(layer).__name__ != family + _LAYER or layer.training:
        return False
    head_norms = ("q_norm", "k_norm") if kind.head_norms else ()
    parts = {
        "": family + _LAYER,
        "self_attn": family + "Attention",
        "mlp": family + "MLP",
        **dict.fromkeys(kind.norms, family + "RMSNorm"),
        **{f"self_attn.{name}": family + "RMSNorm" for name in head_norms},
    }
    found = dict(layer.named_modules())
    linears = {f"self_attn.{name}" for name in _ATTENTION_LINEARS}
    linears |= {f"mlp.{name}" for name in _MLP_LINEARS}
    activation = found.pop("mlp.act_fn", None)
    if type(activation).__name__ not in ACTIVATIONS or is_replaced(activation):
        return False
    return found.keys() == parts.keys() | linears and all(
        (
            (type(module) is SmallLinear or (type(module) is nn.Linear and is_plain(module)))
            if name in linears
            else type(module).__name__ == parts[name] and type(module).__module__.startswith(HOME)
        )
        and not is_replaced(module)
        for name, module in found.items()
    )


class CompiledLayers:
    """A model's layers, for one row of each prompt of a batch, or for few rows of one prompt.

    Parameters
    ----------
    description
        The layers.
    quantised
        One of `QUANTISED`, or None.

    Raises
    ------
    ParameterError
        If the weights of layers do not fit each other, or a kernel.
    """

    def __init__(self, description: Description, *, quantised: str | None) -> None:
        self._quantised = quantised
        self._first_layers = description.tables
        self._head_dim = description.head_dim
        widths, dtype = description.widths, description.dtype
        most_inputs = max(widths[name] for name in (HIDDEN, "gathered", "gate"))
        is_quantised = quantised is not None or all(
            isinstance(one.layer, SmallLinear)
            for operations in description.layers
            for one in operations
            if isinstance(one, Linear)
        )
        self._most_rows = None if is_quantised else most_rows(dtype, most_inputs)
        self._rows = rows = RowLayers(dtype, widths[HIDDEN])
        slots = {name: rows.add_slot(width) for name, width in widths.items() if name != HIDDEN}
        # Operations write to another slot than they read.
        more = {f"{name} 2": rows.add_slot(widths[name]) for name in ("query", "key", "gate")}
        self._slots = {HIDDEN: 0, **slots, **more}
        for operations in description.layers:
            gate = "gate"
            for operation in operations:
                if isinstance(operation, Gate):
                    gate, up, to = "gate 2", self._slots["up"], self._slots["gate 2"]
                    rows.gate(self._slots["gate"], up, to, is_gelu=operation.is_gelu)
                elif isinstance(operation, Attention):
                    self._attend(operation)
                elif isinstance(operation, RowNorm):
                    self._norm(*operation)
                else:
                    source = gate if operation.source == "gate" else operation.source
                    self._linear(*operation._replace(source=source))
            rows.end_layer()
        # The angles of rows that were computed last, by table: layers share both.
        self._angles: tuple[torch.Tensor, dict[int, tuple[RotaryTable, RotaryTable]]]
        self._angles = torch.empty(0), {}

    def _attend(self, operation: Attention) -> None:
        rows, slots = self._rows, self._slots
        turned = []
        for number, name in enumerate(("query", "key")):
            source, to = name, f"{name} 2"
            if operation.norms is not None:
                self._norm(operation.norms[number], source, to, adds=False)
                source, to = to, source
            rows.rotate(slots[source], slots[to], operation.table, self._head_dim)
            turned.append(slots[to])
        (query, key), value, gathered = turned, slots["value"], slots["gathered"]
        rows.attend(query, key, value, gathered, self._head_dim, operation.scores)

    def _linear(self, linear: nn.Linear, source: str, to: str, adds: bool) -> None:
        read, write = self._slots[source], self._slots["moved" if adds else to]
        if isinstance(linear, SmallLinear):
            self._rows.quantised_linear(read, write, linear.kernel())
        elif self._quantised is not None:
            layer = quantised_layer(linear, self._quantised)
            if layer is None:
                raise ParameterError(f"weight: expected one that {self._quantised} can compute")
            self._rows.quantised_linear(read, write, layer)
        else:
            self._rows.linear(read, write, linear.weight, linear.bias)
        if adds:
            self._rows.add(self._slots[to], write, self._slots[to])

    def _norm(self, norm: Norm, source: str, to: str, adds: bool) -> None:
        write = self._slots["normed" if adds else to]
        self._rows.norm(
            self._slots[source], write, norm.weight, norm.epsilon, adds_one=norm.adds_one
        )
        if adds:
            self._rows.add(self._slots[to], write, self._slots[to])

    def run(self, hidden: torch.Tensor, tables: Sequence[RotaryTable], batch: BatchRows) -> None:
        """Replace the first layer's inputs ``[B, hidden]`` by the last layer's outputs.

        Parameters
        ----------
        tables
            Each layer's table of the rows' positions.
        batch
            The rows, on the CPU.
        """
        used = [(tables[index].cos, tables[index].sin) for index in self._first_layers]
        self._rows.run(hidden, used, batch.addresses, batch.capacities, batch.places)

    def can_run(self, num_rows: int) -> bool:
        """Return whether this many rows of one prompt are computed as fast here as by modules."""
        return self._most_rows is None or num_rows <= self._most_rows

    def run_rows(
        self,
        layer_index: int,
        hidden: torch.Tensor,
        mask: RowMask,
        kv: tuple[torch.Tensor, torch.Tensor],
        table: RotaryTable,
        mass: Mass | None,
    ) -> None:
        """Replace a layer's inputs ``[n, hidden]`` by its outputs, for rows of one prompt.

        Parameters
        ----------
        layer_index
            The layer.
        mask
            The rows, and the first key that they see.
        kv
            The prompt's placed keys and values ``[H, K, D]`` from that key on, up to the last row;
            the rows' own are written there.
        table
            The layer's table of all positions.
        mass
            Where to write what keys get; None: nowhere.
        """
        rows, first_key = mask.positions, mask.first_key
        if self._angles[0] is not rows:
            self._angles = rows, {}
        angles = self._angles[1]
        if id(table) not in angles:
            angles[id(table)] = table, table.at(rows)
        _, at = angles[id(table)]
        places = rows.numpy()
        if first_key:
            places = places - first_key
        self._rows.run_layer(layer_index, hidden, (at.cos, at.sin), kv, places, mass)
