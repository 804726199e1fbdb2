"""What is computed number by number: norms, the gates of MLPs, and the rotation of keys.

Each takes one pass over memory. Numbers are rounded to their type where Transformers' layers round
them. So in bfloat16 results are nearly always equal bit for bit; in float32, the order of a norm's
sum and the last bits of exponentials differ.
"""

from __future__ import annotations

import torch

from kvrag.errors import ParameterError
from kvrag.native.arrays import check_threads
from kvrag.native.attention import ATTENTION_TYPES
from kvrag.native.kernels import kernels


def rms_norm(
    rows: torch.Tensor, weight: torch.Tensor, epsilon: float, *, adds_one: bool = False
) -> torch.Tensor:
    """Return rows over the root of their mean square, times weights.

    Parameters
    ----------
    rows
        ``[..., width]`` float32 or bfloat16 on the CPU.
    weight
        ``[width]`` of the same type.
    epsilon
        Added to the mean square.
    adds_one
        Whether the weights are less by 1, and products alone are rounded, as in Gemma. Otherwise
        rows are rounded before they are multiplied, as in Llama.

    Raises
    ------
    ParameterError
        If rows and weights do not fit each other, or are of another type or device.
    """
    width = rows.shape[-1]
    if weight.shape != (width,):
        raise ParameterError(f"weight: expected shape [{width}], found {list(weight.shape)}")
    rows = _sound(rows, "rows", rows.dtype)
    weight = _sound(weight, "weight", rows.dtype)
    out = torch.empty_like(rows)
    kernels.norm(
        rows.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        rows.numel() // max(width, 1),
        width,
        epsilon,
        adds_one,
        rows.dtype == torch.bfloat16,
        check_threads(torch.get_num_threads()),
    )
    return out


def gated(gate: torch.Tensor, up: torch.Tensor, *, is_gelu: bool = False) -> torch.Tensor:
    """Return an activation of one tensor times another of the same shape.

    Parameters
    ----------
    gate, up
        Float32 or bfloat16 on the CPU.
    is_gelu
        Whether the activation is GELU as approximated by tanh; otherwise it is SiLU.

    Raises
    ------
    ParameterError
        If the tensors differ in shape, or are of another type or device.
    """
    if gate.shape != up.shape:
        raise ParameterError(f"up: expected shape {list(gate.shape)}, found {list(up.shape)}")
    gate = _sound(gate, "gate", gate.dtype)
    up = _sound(up, "up", gate.dtype)
    out = torch.empty_like(gate)
    kernels.gate(
        gate.data_ptr(),
        up.data_ptr(),
        out.data_ptr(),
        gate.numel(),
        is_gelu,
        gate.dtype == torch.bfloat16,
        check_threads(torch.get_num_threads()),
    )
    return out


def rotate(rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor) -> bool:
    """Rotate rows' first R channels in halves, in float32, and write them to `out`.

    Parameters
    ----------
    rows
        ``[H, n, D]`` on the CPU.
    cos, sin
        ``[n, R]`` float32, of which the first half counts.
    out
        ``[H, n, D]``; it does not overlap `rows`.

    Returns
    -------
    bool
        Whether the rows were rotated. They are not if rows and `out` are not both float32 or both
        bfloat16, if channels are not next to each other, or if gradients are wanted.
    """
    dtype = rows.dtype
    is_ours = (
        dtype == out.dtype
        and dtype in ATTENTION_TYPES
        and rows.device.type == out.device.type == cos.device.type == "cpu"
        and rows.stride(-1) == out.stride(-1) == cos.stride(-1) == sin.stride(-1) == 1
        and cos.stride() == sin.stride()
        and cos.dtype == sin.dtype == torch.float32
        and rows.dim() == 3
        and not (rows.requires_grad and torch.is_grad_enabled())
    )
    if not is_ours:
        return False
    shape = num_heads, num_tokens, head_dim = rows.shape
    num_rotated = cos.shape[1]
    if out.shape != shape or cos.shape != sin.shape or len(cos) != num_tokens:
        raise ParameterError(
            f"rows, angles and out: expected shapes that fit, found {list(shape)}, "
            f"{list(cos.shape)}, {list(sin.shape)} and {list(out.shape)}"
        )
    if num_rotated > head_dim or num_rotated % 2:
        raise ParameterError(
            f"cos: expected an even number of columns, at most {head_dim}, found {num_rotated}"
        )
    if rows.numel():
        kernels.rotate(
            rows.data_ptr(),
            out.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            rows.stride(0),
            rows.stride(1),
            out.stride(0),
            out.stride(1),
            cos.stride(0),
            num_heads,
            num_tokens,
            head_dim,
            num_rotated,
            dtype == torch.bfloat16,
        )
    return True


def _sound(tensor: torch.Tensor, name: str, dtype: torch.dtype) -> torch.Tensor:
    if tensor.device.type != "cpu" or tensor.dtype != dtype or dtype not in ATTENTION_TYPES:
        known = " or ".join(map(str, ATTENTION_TYPES))
        raise ParameterError(
            f"{name}: expected {known} on the CPU, all of one type, found {tensor.dtype} on "
            f"{tensor.device}"
        )
    return tensor.detach().contiguous()
