"""Weights in oneDNN's layout: faster on CPUs, above all for few rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from kvrag.errors import ParameterError
from kvrag.native import instruction_set

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
