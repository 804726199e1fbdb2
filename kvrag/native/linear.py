"""Linear layers over few rows, as in decoding, which read each weight once; and in 8 bits."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from kvrag.errors import ParameterError
from kvrag.native.arrays import check_contiguous, check_shape, check_threads
from kvrag.native.attention import ATTENTION_TYPES
from kvrag.native.kernels import IS_COMPILED, kernels

INT8_PANEL: int = kernels.INT8_PANEL
"""Outputs whose weights in 8 bits lie together."""

MAX_ROWS = 32
"""With more rows, libraries for large matrices are faster, unless a matrix unit multiplies."""


MAX_INT8_INPUTS = 1 << 15
"""With more inputs, a sum of products in 8 bits might not fit 32."""

_PEAK = 127
_QUAD = 4
_PANELS_AT_ONCE = 32


class FewRowsLinear:
    """Computes a linear layer over weights as they are. Sums are float32.

    A row's bits do not depend on the other rows.

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
        check_contiguous(weight, "weight", weight.dtype)
        if bias is not None:
            check_shape(bias.shape, (weight.shape[0],), "bias")
            check_contiguous(bias, "bias", weight.dtype)
        self._weight, self._bias = weight, bias
        self._num_outputs, self._num_inputs = weight.shape

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Return ``[..., num_outputs]`` for rows ``[..., num_inputs]``, in the weights' type.

        Raises
        ------
        ParameterError
            If the rows do not fit the weights.
        """
        weight, bias = self._weight, self._bias
        *shape, num_inputs = rows.shape
        num_rows = rows.numel() // max(num_inputs, 1)
        if num_inputs != self._num_inputs:
            raise ParameterError(
                f"rows: expected {self._num_inputs} channels, found {list(rows.shape)}"
            )
        rows = rows.detach().contiguous()
        check_contiguous(rows, "rows", weight.dtype)
        out = rows.new_empty(*shape, self._num_outputs)
        if num_rows:
            kernels.linear(
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


class Int8Linear:
    """Computes a linear layer in 8 bits, for any number of rows.

    Each row of inputs and each output's weights have a scale, their greatest magnitude over 127.
    Products are summed exactly, so the result depends neither on the other rows nor on threads. A
    row with an infinite number or NaN gives NaN.

    Parameters
    ----------
    weight
        ``[num_outputs, num_inputs]`` of any floating type on the CPU, at most `MAX_INT8_INPUTS`
        inputs. It is copied: later changes do not count.
    bias
        ``[num_outputs]``, or None.

    Raises
    ------
    ParameterError
        If the weights or the bias have another shape, are elsewhere, or are not finite.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        if not IS_COMPILED:
            raise ParameterError("8 bits need kvrag's compiled kernels: see 'kvrag doctor'")
        check_shape(weight.shape, (None, None), "weight")
        self._num_outputs, self._num_inputs = num_outputs, num_inputs = weight.shape
        if weight.device.type != "cpu" or not weight.is_floating_point() or not num_inputs:
            raise ParameterError(
                f"weight: expected floating numbers on the CPU, found {weight.dtype} of shape "
                f"{list(weight.shape)} on {weight.device}"
            )
        if num_inputs > MAX_INT8_INPUTS:
            raise ParameterError(
                f"weight: expected at most {MAX_INT8_INPUTS} inputs, found {num_inputs}"
            )
        if bias is not None:
            check_shape(bias.shape, (num_outputs,), "bias")
        panels = -(-num_outputs // INT8_PANEL)
        quads = -(-num_inputs // _QUAD)
        self._scale = torch.zeros(panels * INT8_PANEL)
        self._bias = torch.zeros(panels * INT8_PANEL)
        if bias is not None:
            self._bias[:num_outputs] = bias.detach()
        self._weight = torch.full((panels, quads, INT8_PANEL, _QUAD), 128, dtype=torch.uint8)
        # A part at a time, which takes a few megabytes more than the layer.
        for first in range(0, panels, _PANELS_AT_ONCE):
            laid = self._weight[first : first + _PANELS_AT_ONCE]
            outputs = slice(first * INT8_PANEL, (first + len(laid)) * INT8_PANEL)
            values = weight.detach()[outputs].float()
            values = pad(
                values, (0, quads * _QUAD - num_inputs, 0, laid.shape[0] * INT8_PANEL - len(values))
            )
            peak = values.abs().amax(1)
            self._scale[outputs] = peak / _PEAK
            values.mul_((_PEAK / peak.clamp_min(1e-30))[:, None]).round_().add_(128)
            laid.copy_(values.view(len(laid), INT8_PANEL, quads, _QUAD).transpose(1, 2))
        if not self._scale.isfinite().all():
            raise ParameterError("weight: expected finite numbers, found infinite ones or NaN")

    @property
    def parts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Weights, scales and biases as kernels take them."""
        return self._weight, self._scale, self._bias

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of outputs and inputs."""
        return self._num_outputs, self._num_inputs

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Return ``[..., num_outputs]`` for rows ``[..., num_inputs]``, in the rows' type.

        Raises
        ------
        ParameterError
            If the rows do not fit the weights, or are not float32 or bfloat16 on the CPU.
        """
        *shape, num_inputs = rows.shape
        if num_inputs != self._num_inputs or rows.dtype not in ATTENTION_TYPES:
            known = " or ".join(map(str, ATTENTION_TYPES))
            raise ParameterError(
                f"rows: expected {known} with {self._num_inputs} channels, found {rows.dtype} of "
                f"shape {list(rows.shape)}"
            )
        rows = rows.detach().contiguous()
        check_contiguous(rows, "rows", rows.dtype)
        out = rows.new_empty(*shape, self._num_outputs)
        kernels.int8_linear(
            rows.data_ptr(),
            self._weight.data_ptr(),
            self._scale.data_ptr(),
            self._bias.data_ptr(),
            out.data_ptr(),
            rows.numel() // num_inputs,
            num_inputs,
            self._num_outputs,
            rows.dtype == torch.bfloat16,
            check_threads(torch.get_num_threads()),
        )
        return out
