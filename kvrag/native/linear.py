"""Linear layers over few rows, as in decoding: each weight is read once."""

from __future__ import annotations

import torch

from kvrag import _native
from kvrag.errors import ParameterError
from kvrag.native.arrays import check_shape, check_threads
from kvrag.native.attention import ATTENTION_TYPES

MAX_ROWS = 16
"""With more rows, libraries for large matrices are faster."""


class FewRowsLinear:
    """Computes a linear layer for at most `MAX_ROWS` rows. Sums are float32.

    Parameters
    ----------
    weight
        ``[num_outputs, num_inputs]`` float32 or bfloat16 on the CPU, contiguous. It is not copied:
        changes in place count.
    bias
        ``[num_outputs]`` of the same type, or None.

    Raises
    ------
    ParameterError
        If the weights or the bias have another shape, type, place or order in memory.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        if weight.dtype not in ATTENTION_TYPES:
            known = ", ".join(map(str, ATTENTION_TYPES))
            raise ParameterError(f"weight: expected {known}, found {weight.dtype}")
        check_shape(weight.shape, (None, None), "weight")
        _check(weight, "weight", weight.dtype)
        if bias is not None:
            check_shape(bias.shape, (weight.shape[0],), "bias")
            _check(bias, "bias", weight.dtype)
        self._weight, self._bias = weight, bias
        self._num_outputs, self._num_inputs = weight.shape

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Return ``[..., num_outputs]`` for rows ``[..., num_inputs]``, in the weights' type.

        Raises
        ------
        ParameterError
            If there are more than `MAX_ROWS` rows, or they do not fit the weights.
        """
        weight, bias = self._weight, self._bias
        *shape, num_inputs = rows.shape
        num_rows = rows.numel() // max(num_inputs, 1)
        if num_inputs != self._num_inputs or num_rows > MAX_ROWS:
            raise ParameterError(
                f"rows: expected at most {MAX_ROWS} with {self._num_inputs} channels, "
                f"found {list(rows.shape)}"
            )
        rows = rows.detach().contiguous()
        _check(rows, "rows", weight.dtype)
        out = rows.new_empty(*shape, self._num_outputs)
        if num_rows:
            _native.linear(
                rows.data_ptr(),
                weight.data_ptr(),
                0 if bias is None else bias.data_ptr(),
                out.data_ptr(),
                num_rows,
                num_inputs,
                self._num_outputs,
                weight.dtype == torch.bfloat16,
                check_threads(torch.get_num_threads()),
            )
        return out


def _check(tensor: torch.Tensor, name: str, dtype: torch.dtype) -> None:
    if tensor.device.type != "cpu" or tensor.dtype != dtype or not tensor.is_contiguous():
        raise ParameterError(
            f"{name}: expected contiguous {dtype} on the CPU, found {tensor.dtype} with strides "
            f"{tensor.stride()} on {tensor.device}"
        )
