"""A model's layers as a list of operations for kernels: few rows without Python between.

Only layers of Transformers whose arithmetic is written down here are computed so. They are known by
name and by their parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from kvrag.errors import ParameterError
from kvrag.models.batch import BatchRows
from kvrag.models.elements import ACTIVATIONS, HOME, NORMS, is_replaced
from kvrag.models.linears import int8_layer, most_rows
from kvrag.native import HAS_ROW_LAYERS, Mass, RowLayers
from kvrag.positions.rotary import RotaryTable


@dataclass(frozen=True)
class _Kind:
    """How a family's layers are put together.

    Attributes
    ----------
    norms
        A layer's norms, in the order in which they are used.
    head_norms
        Whether attention has norms of queries and keys.
    caps
        Whether attention caps its scores as its ``attn_logit_softcapping`` says.
    """

    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    head_norms: bool = False
    caps: bool = False


_FOUR_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_KINDS = {
    "Llama": _Kind(),
    "Mistral": _Kind(),
    "Qwen2": _Kind(),
    "Qwen3": _Kind(head_norms=True),
    "Gemma2": _Kind(norms=_FOUR_NORMS, caps=True),
    "Gemma3": _Kind(norms=_FOUR_NORMS, head_norms=True),
}
_LAYER = "DecoderLayer"
_ATTENTION_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP_LINEARS = ("gate_proj", "up_proj", "down_proj")


def compile_layers(
    layers: Sequence[nn.Module],
    windows: Sequence[int | None],
    tables: Sequence[RotaryTable],
    *,
    in_int8: bool,
) -> CompiledLayers | None:
    """Return a model's layers, compiled; None if only their modules can compute them.

    Parameters
    ----------
    layers
        The model's decoder layers, as they are now. A later hook, adapter or exchange of weights
        does not count, nor a change in place in 8 bits.
    windows
        Each layer's sliding window in tokens, None if it sees everything.
    tables
        Each layer's table of any positions; layers share tables.
    in_int8
        Whether linear layers compute in 8 bits; otherwise they do in the type of the weights.
    """
    if not HAS_ROW_LAYERS or any(type(table) is not RotaryTable for table in tables):
        return None
    if not len(layers) == len(windows) == len(tables) or _has_any_global_hook():  # type: ignore[no-untyped-call]
        return None
    if not all(_is_known(layer) for layer in layers):
        return None
    try:
        return CompiledLayers(layers, windows, tables, in_int8=in_int8)
    except ParameterError:
        return None  # weights on a GPU, of another type, or in another order


def _is_known(layer: nn.Module) -> bool:
    """Return whether a layer is made of exactly the modules that are known here."""
    family = type(layer).__name__.removesuffix(_LAYER)
    kind = _KINDS.get(family)
    if kind is None or type(layer).__name__ != family + _LAYER or layer.training:
        return False
    head_norms = ("q_norm", "k_norm") if kind.head_norms else ()
    parts = {
        "": family + _LAYER,
        "self_attn": family + "Attention",
        "mlp": family + "MLP",
        **dict.fromkeys(kind.norms, family + "RMSNorm"),
        **{f"self_attn.{name}": family + "RMSNorm" for name in head_norms},
        **{f"self_attn.{name}": "Linear" for name in _ATTENTION_LINEARS},
        **{f"mlp.{name}": "Linear" for name in _MLP_LINEARS},
    }
    found = dict(layer.named_modules())
    activation = found.pop("mlp.act_fn", None)
    if type(activation).__name__ not in ACTIVATIONS or is_replaced(activation):
        return False
    return found.keys() == parts.keys() and all(
        type(module).__name__ == parts[name]
        and (type(module) is nn.Linear or type(module).__module__.startswith(HOME))
        and not is_replaced(module)
        for name, module in found.items()
    )


class CompiledLayers:
    """A model's layers, for one row of each prompt of a batch, or for few rows of one prompt.

    Parameters
    ----------
    layers
        The model's decoder layers.
    windows
        Each layer's sliding window in tokens, None if it sees everything.
    tables
        Each layer's table of any positions; layers share tables.
    in_int8
        Whether linear layers compute in 8 bits.

    Raises
    ------
    ParameterError
        If the weights of layers do not fit each other, or a kernel.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        windows: Sequence[int | None],
        tables: Sequence[RotaryTable],
        *,
        in_int8: bool,
    ) -> None:
        self._in_int8 = in_int8
        numbers: dict[int, int] = {}
        self._first_layers = []
        for index, table in enumerate(tables):
            if id(table) not in numbers:
                numbers[id(table)] = len(numbers)
                self._first_layers.append(index)
        first: Any = layers[0]
        attention, mlp = first.self_attn, first.mlp
        self._width = width = attention.q_proj.in_features
        dtype = attention.q_proj.weight.dtype
        most_inputs = max(
            linear.in_features for linear in (attention.q_proj, attention.o_proj, mlp.down_proj)
        )
        self._most_rows = None if in_int8 else most_rows(dtype, most_inputs)
        self._rows = rows = RowLayers(dtype, width)
        num_asked = attention.q_proj.out_features
        num_given = attention.k_proj.out_features
        self._normed, self._moved = rows.add_slot(width), rows.add_slot(width)
        self._asked = [rows.add_slot(num_asked) for _ in range(2)]
        self._keys = [rows.add_slot(num_given) for _ in range(2)]
        self._values, self._gathered = rows.add_slot(num_given), rows.add_slot(num_asked)
        self._gate, self._up, self._gated = (
            rows.add_slot(mlp.gate_proj.out_features) for _ in range(3)
        )
        for layer, window, table in zip(layers, windows, tables, strict=True):
            self._add(layer, window, numbers[id(table)])
            rows.end_layer()
        # The angles of rows that were computed last, by table: layers share both.
        self._angles: tuple[torch.Tensor, dict[int, tuple[RotaryTable, RotaryTable]]]
        self._angles = torch.empty(0), {}

    def _add(self, layer: Any, window: int | None, table: int) -> None:
        kind = _KINDS[type(layer).__name__.removesuffix(_LAYER)]
        rows, attention, mlp = self._rows, layer.self_attn, layer.mlp
        head_dim: int = attention.head_dim
        norms = [getattr(layer, name) for name in kind.norms]
        is_around = len(norms) == len(_FOUR_NORMS)
        before, after = (norms[::2], norms[1::2]) if is_around else (norms, (None, None))
        self._norm(before[0], 0, self._normed, self._width)
        asked, turned_asked = self._asked
        keys, turned_keys = self._keys
        self._linear(attention.q_proj, self._normed, asked)
        self._linear(attention.k_proj, self._normed, keys)
        self._linear(attention.v_proj, self._normed, self._values)
        if kind.head_norms:
            self._norm(attention.q_norm, asked, turned_asked, head_dim)
            self._norm(attention.k_norm, keys, turned_keys, head_dim)
            asked, turned_asked, keys, turned_keys = turned_asked, asked, turned_keys, keys
        rows.rotate(asked, turned_asked, table, head_dim)
        rows.rotate(keys, turned_keys, table, head_dim)
        rows.attend(
            turned_asked,
            turned_keys,
            self._values,
            self._gathered,
            head_dim=head_dim,
            window=window,
            scale=attention.scaling,
            softcap=attention.attn_logit_softcapping if kind.caps else None,
        )
        self._finish(attention.o_proj, self._gathered, after[0])
        self._norm(before[1], 0, self._normed, self._width)
        self._linear(mlp.gate_proj, self._normed, self._gate)
        self._linear(mlp.up_proj, self._normed, self._up)
        is_gelu = ACTIVATIONS[type(mlp.act_fn).__name__]
        rows.gate(self._gate, self._up, self._gated, is_gelu=is_gelu)
        self._finish(mlp.down_proj, self._gated, after[1])

    def _finish(self, linear: nn.Linear, source: int, norm: nn.Module | None) -> None:
        """Add what a linear layer makes, and a norm of it, to the rows."""
        self._linear(linear, source, self._moved)
        moved = self._moved
        if norm is not None:
            self._norm(norm, moved, self._normed, self._width)
            moved = self._normed
        self._rows.add(0, moved, 0)

    def _linear(self, linear: nn.Linear, source: int, to: int) -> None:
        if not self._in_int8:
            self._rows.linear(source, to, linear.weight, linear.bias)
            return
        layer = int8_layer(linear)
        if layer is None:
            raise ParameterError("weight: expected one that can be computed in 8 bits")
        self._rows.int8_linear(source, to, layer)

    def _norm(self, norm: Any, source: int, to: int, width: int) -> None:
        adds_one, epsilon = NORMS[type(norm).__name__]
        if norm.weight.shape != (width,):
            raise ParameterError(f"weight: expected {width}, found {list(norm.weight.shape)}")
        self._rows.norm(source, to, norm.weight, getattr(norm, epsilon), adds_one=adds_one)

    def run(self, hidden: torch.Tensor, tables: Sequence[RotaryTable], batch: BatchRows) -> None:
        """Replace the first layer's inputs ``[B, hidden]`` by the last layer's outputs.

        Parameters
        ----------
        tables
            Each layer's table of the rows' positions.
        batch
            The rows, on the CPU and unscaled.
        """
        used = [tables[index] for index in self._first_layers]
        self._rows.run(
            hidden,
            [(table.cos, table.sin) for table in used],
            batch.addresses,
            batch.capacities,
            batch.places,
            threads=torch.get_num_threads(),
        )

    def can_run(self, num_rows: int) -> bool:
        """Return whether this many rows of one prompt are computed as fast here as by modules."""
        return self._most_rows is None or num_rows <= self._most_rows

    def run_rows(
        self,
        layer_index: int,
        hidden: torch.Tensor,
        rows: torch.Tensor,
        kv: tuple[torch.Tensor, torch.Tensor],
        table: RotaryTable,
        *,
        first_key: int,
        mass: Mass | None,
    ) -> None:
        """Replace a layer's inputs ``[n, hidden]`` by its outputs, for rows of one prompt.

        Parameters
        ----------
        layer_index
            The layer.
        rows
            ``[n]`` ascending positions.
        kv
            The prompt's placed keys and values ``[H, K, D]`` from `first_key` on, up to the last
            row; the rows' own are written there.
        table
            The layer's table of all positions.
        first_key
            The position of the first key.
        mass
            Where to write what keys get; None: nowhere.
        """
        known, angles = self._angles
        if known is not rows:
            angles = {}
            self._angles = rows, angles
        if id(table) not in angles:
            angles[id(table)] = table, RotaryTable(table.cos[rows], table.sin[rows])
        _, at = angles[id(table)]
        places = rows.numpy()
        self._rows.run_layer(
            layer_index,
            hidden,
            (at.cos, at.sin),
            *kv,
            places - first_key if first_key else places,
            mass=mass,
            threads=torch.get_num_threads(),
        )
