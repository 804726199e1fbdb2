"""A model's linear layers on the CPU: few rows, many rows, and other precisions.

`fast_modules` lets modules compute so inside a block. Their parameters and the model's own forward
pass stay as they are.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from types import FunctionType
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import nn
from torch.nn.functional import linear

from kvrag.arguments import INT8, QUANTISED
from kvrag.errors import ParameterError
from kvrag.models.elements import element_forwards, is_patched
from kvrag.models.quantised import is_plain
from kvrag.native.attention import ATTENTION_TYPES
from kvrag.native.kernels import instruction_set
from kvrag.native.linear import MAX_ROWS, FewRowsLinear, GroupedLinear, GroupedWeight, Int8Linear

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# The layout is chosen for this many rows; other numbers work too.
_NUM_ROWS = 128
ROWS_STEP = 16
"""Rows are padded to a multiple of this.

oneDNN compiles and keeps a kernel (0.7 MB) for each shape that it meets, up to a thousand of them:
so the shapes are few. A matrix unit takes as many rows at once, and as long for fewer.
"""


class PackedWeight:
    """A linear layer's weights in oneDNN's layout, and the computation over them.

    Parameters
    ----------
    weight, bias
        Those of a linear layer, of a type that `can_pack`. The weight is copied.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._num_outputs, self._num_inputs = weight.shape
        self._bias = bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _NUM_ROWS)

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return ``[..., num_outputs]`` for ``[..., num_inputs]``."""
        rows = inputs.reshape(-1, self._num_inputs)
        num_rows = len(rows)
        if more := -num_rows % ROWS_STEP:
            # What is computed of the rest is not read: `pad` would take thrice as long to clear it.
            filled = rows.new_empty(num_rows + more, self._num_inputs)
            filled[:num_rows] = rows
            rows = filled
        made: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self._packed, self._bias, "none", [], ""
        )
        return made[:num_rows].view(*inputs.shape[:-1], self._num_outputs)


class PackedLinear(nn.Module):
    """A linear layer's computation with weights in another layout.

    Parameters
    ----------
    linear
        The layer. Its weight is copied; dropping the layer frees the original.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        # Opaque: not a parameter that could be saved or trained.
        self._packed = PackedWeight(linear.weight, linear.bias)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return ``[..., out_features]``."""
        return self._packed(inputs)

    def _save_to_state_dict(
        self,
        destination: Any,  # noqa: ARG002
        prefix: str,
        keep_vars: bool,  # noqa: ARG002
    ) -> None:
        # A checkpoint without these weights would look complete, and so would its digest.
        raise ParameterError(
            f"{prefix}weight is packed for oneDNN and cannot be saved, hashed or trained: load the "
            "model once more"
        )


def pack_linears(hf: PreTrainedModel) -> int:
    """Replace a model's linear layers in place, and return how many there were to replace.

    The output embeddings stay, since they are often the input's. Afterwards the model cannot be
    trained, saved or hashed. Nothing changes on other devices, for other types, or if torch was
    built without oneDNN.
    """
    if hf.device.type != "cpu" or not can_pack(hf.dtype):
        return 0
    base: nn.Module = hf.base_model
    # Families' own linear layers do more than this one knows. Only the names are held here: with
    # the layers themselves, all weights would be in memory twice for a while.
    names = [name for name, one in base.named_modules() if type(one) is nn.Linear]
    for name in names:
        parent, _, last = name.rpartition(".")
        linear: Any = base.get_submodule(name)
        setattr(base.get_submodule(parent), last, PackedLinear(linear))
    return len(names)


def can_pack(dtype: torch.dtype) -> bool:
    """Return whether oneDNN is available and multiplies this type on this processor."""
    ops = torch.ops.mkldnn
    wanted = ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not has_onednn or not all(hasattr(ops, one) for one in wanted):
        return False
    if dtype == torch.bfloat16:
        return bool(ops._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def multiplies_squares(dtype: torch.dtype) -> bool:
    """Return whether a matrix unit of this processor (AMX) multiplies this type.

    It takes about as long for sixteen rows as for one, which is as fast as memory delivers weights.
    """
    return dtype == torch.bfloat16 and instruction_set() == "amxbf16" and can_pack(dtype)


Forward = Callable[[torch.Tensor], torch.Tensor]

# With at most this many rows, weights as they are are as fast as packed ones, which are copies.
_MOST_ROWS = 16
# A matrix unit is as fast with `MAX_ROWS`, and with more whose inputs fit a core's cache.
_MOST_BY_SQUARES = 256
_MOST_INPUTS = 256 * 1536

_Kind = tuple[str, bool, bool]
_ways: WeakKeyDictionary[nn.Linear, dict[_Kind, tuple[_Way, Forward]]] = WeakKeyDictionary()

_Modules = list[tuple[dict[str, Any], Forward]]

_modules: WeakKeyDictionary[nn.Module, dict[tuple[str, bool, int | None], _Modules]] = (
    WeakKeyDictionary()
)

# What this module has put into modules, to tell it from what others put there.
_ours: WeakSet[Forward] = WeakSet()


def linear_forwards(
    model: nn.Module, precision: str, *, each_row: bool
) -> Iterator[tuple[nn.Module, Forward]]:
    """Yield a model's linear layers, each with what computes it; see `fast_modules`."""
    get_head = getattr(model, "get_output_embeddings", None)
    head = None if get_head is None else get_head()
    for layer in model.modules():
        if type(layer) is nn.Linear and is_plain(layer) and not is_patched(nn.Linear):
            _, forward = _way_of(layer, precision, is_head=layer is head, each_row=each_row)
            yield layer, forward


def most_rows(dtype: torch.dtype, num_inputs: int) -> int:
    """Return how many rows of a prompt are computed over weights as they are, in their type."""
    if not multiplies_squares(dtype):
        return _MOST_ROWS
    return max(MAX_ROWS, min(_MOST_BY_SQUARES, _MOST_INPUTS // max(num_inputs, 1)))


def quantised_layer(layer: nn.Linear, precision: str) -> Int8Linear | GroupedLinear | None:
    """Return a layer in 8 or 4 bits, as its weights are now; None if it cannot be computed so."""
    way, _ = _way_of(layer, precision, is_head=False, each_row=False)
    compute = way.current()
    return compute if isinstance(compute, Int8Linear | GroupedLinear) else None


def _way_of(
    layer: nn.Linear, precision: str, *, is_head: bool, each_row: bool
) -> tuple[_Way, Forward]:
    """Return what computes a layer, and what replaces its ``forward``.

    They are the same wherever they compute the same, since they keep copies.
    """
    dtype = layer.weight.dtype
    is_own = is_head or str(dtype).removeprefix("torch.") == precision
    # Only where a number of rows decides between kernels.
    differs = each_row and is_own and precision not in QUANTISED and not multiplies_squares(dtype)
    known = _ways.setdefault(layer, {})
    kind = precision, is_head, differs
    if kind not in known:
        way = _Way(layer, *kind)
        known[kind] = way, _forward_of(way, layer)
    return known[kind]


class _Way:
    """What computes a layer in some precision, made again when the layer's weights have changed."""

    def __init__(self, layer: nn.Linear, precision: str, is_head: bool, each_row: bool) -> None:
        self._parameters = layer._parameters
        self._kind = precision, is_head, each_row
        self._compute: Forward | None = None
        # What it computes with. It is kept alive, so no other tensor has these addresses.
        self._known: tuple[torch.Tensor, torch.Tensor | None] | None = None
        self._versions: tuple[int, int] | None = None

    def current(self) -> Forward | None:
        """Return what computes the layer; None if only PyTorch can."""
        weight, bias = self._parameters["weight"], self._parameters["bias"]
        assert weight is not None
        known, versions = self._known, (_version(weight), _version(bias))
        if (
            known is None
            or versions != self._versions
            or not (_is_same(weight, known[0]) and _is_same(bias, known[1]))
        ):
            known = weight.detach(), None if bias is None else bias.detach()
            precision, is_head, each_row = self._kind
            # First: a model's twins ask at the same time.
            self._compute = _computes(*known, precision, is_head=is_head, each_row=each_row)
            self._known, self._versions = known, versions
        return self._compute


def _forward_of(way: _Way, layer: nn.Linear) -> Forward:
    parameters, own, plain = layer._parameters, ref(layer), nn.Linear.forward

    # Not held by `way`: a cycle would keep all copies until the next collection of garbage.
    def forward(rows: torch.Tensor) -> torch.Tensor:
        if nn.Linear.forward is not plain:  # somebody has patched it since
            return nn.Linear.forward(cast("nn.Linear", own()), rows)
        weight = parameters["weight"]
        assert weight is not None
        if rows.dtype == weight.dtype and not torch.is_grad_enabled():
            compute = way.current()
            if compute is not None:
                return compute(rows)
        return linear(rows, weight, parameters["bias"])

    return forward


def _version(parameter: torch.Tensor | None) -> int:
    """Return a number that changes whenever a parameter is written in place."""
    return 0 if parameter is None or parameter.is_inference() else parameter._version


def _is_same(parameter: torch.Tensor | None, known: torch.Tensor | None) -> bool:
    if parameter is None or known is None:
        return parameter is known
    return (
        parameter.data_ptr() == known.data_ptr()
        and parameter.shape == known.shape
        and parameter.stride() == known.stride()
    )


def _computes(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    precision: str,
    *,
    is_head: bool,
    each_row: bool,
) -> Forward | None:
    """Return what computes a layer; None if only PyTorch can."""
    if weight.device.type != "cpu" or not weight.is_floating_point():
        return None
    if precision in QUANTISED:
        try:
            layer: Int8Linear | GroupedLinear
            if precision == INT8:
                layer = Int8Linear(weight, bias)
            else:
                layer = GroupedLinear(GroupedWeight.quantise(weight, 8 if is_head else 4), bias)
        except ParameterError:
            return None  # too wide, or not finite
        return layer if weight.dtype in ATTENTION_TYPES else _through(torch.float32, layer)
    dtype: torch.dtype = getattr(torch, precision)
    if is_head or weight.dtype == dtype:
        return _own_type(weight, bias, packs=not (each_row or is_head))
    given = None if bias is None else bias.to(dtype)
    if not can_pack(dtype):
        other = weight.to(dtype)
        return _through(dtype, lambda rows: linear(rows, other, given))
    return _through(dtype, PackedWeight(weight.to(dtype), given))


def _through(dtype: torch.dtype, compute: Forward) -> Forward:
    return lambda rows: compute(rows.to(dtype)).to(rows.dtype)


def _own_type(weight: torch.Tensor, bias: torch.Tensor | None, *, packs: bool) -> Forward | None:
    """Return what computes a layer in its weights' type."""
    try:
        few = FewRowsLinear(weight, bias)
    except ParameterError:
        return None
    most = MAX_ROWS
    if packs:
        most, packs = most_rows(weight.dtype, weight.shape[1]), can_pack(weight.dtype)
    most *= weight.shape[1]
    packed: PackedWeight | None = None

    def compute(rows: torch.Tensor) -> torch.Tensor:
        nonlocal packed
        if rows.numel() <= most:
            return few(rows)
        if not packs:
            return linear(rows, weight, bias)
        if packed is None:
            packed = PackedWeight(weight, bias)
        return packed(rows)

    return compute


def twin_of(model: nn.Module) -> nn.Module:
    """Return a model's modules again, over the same weights and copies of weights.

    Another thread may switch and compute them at the same time. Modules and hooks that are put
    into one of the two later are not in the other.
    """
    known: dict[int, Any] = {}
    copy.deepcopy(getattr(model, "config", None), known)
    return _twin_of(model, known)


def _twin_of(module: nn.Module, known: dict[int, Any]) -> nn.Module:
    if id(module) in known:
        return cast("nn.Module", known[id(module)])
    twin = known[id(module)] = module.__new__(type(module))
    for name, value in vars(module).items():
        # A configuration says how a model attends; the others are hooks, such as an adapter's.
        own = value.copy() if isinstance(value, OrderedDict) else known.get(id(value), value)
        vars(twin)[name] = own
    twin._modules = {
        name: None if part is None else _twin_of(part, known)
        for name, part in module._modules.items()
    }
    if isinstance(module, nn.Linear) and isinstance(twin, nn.Linear):
        _ways[twin] = _ways.setdefault(module, {})
    return twin


@contextmanager
def fast_modules(
    model: nn.Module, precision: str, *, each_row: bool = False, besides: nn.Module | None = None
) -> Iterator[None]:
    """Let a model's modules on the CPU use kernels inside the block.

    Those are its linear layers, and the norms and MLPs that kernels compute; others, such as
    quantised layers, and those whose ``forward`` somebody replaced, stay as they are. Hold the
    model's lock, and compute without gradients. Which kernel computes a module depends on the
    number of rows alone, so equal calls give equal bits.

    Parameters
    ----------
    model
        The model, or a part of it. At its first call with many rows, each linear layer
        copies its weights in another layout; the copies live as long as the model.
    precision
        What the modules compute in: ``"float32"``, ``"bfloat16"``, ``"int8"`` or ``"int4"``. Their
        inputs and outputs keep the weights' type. The output embeddings compute in that type unless
        it is one of the last two.
    each_row
        Whether rows that belong to different prompts, `MAX_ROWS` at most, are computed as each
        would be alone, bit for bit, where the modules compute in the weights' type.
    besides
        A part of the model that stays as it is; None: no part does.
    """
    known = _modules.setdefault(model, {})
    kind = precision, each_row, None if besides is None else id(besides)
    modules = known.get(kind)
    if modules is None:
        left_out = set() if besides is None else set(besides.modules())
        found = chain(linear_forwards(model, precision, each_row=each_row), element_forwards(model))
        modules = known[kind] = [
            (vars(module), forward) for module, forward in found if module not in left_out
        ]
        _ours.update(forward for _, forward in modules)
    # Past `nn.Module.__setattr__`, which takes longer than the layers of a token.
    before = [own.get("forward") for own, _ in modules]
    try:
        for (own, forward), original in zip(modules, before, strict=True):
            # What somebody else put there stays.
            if original is None or (isinstance(original, FunctionType) and original in _ours):
                own["forward"] = forward
        yield
    finally:
        for (own, _), original in zip(modules, before, strict=True):
            if original is None:
                own.pop("forward", None)
            else:
                own["forward"] = original
