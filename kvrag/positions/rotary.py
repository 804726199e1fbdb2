"""RoPE: rotates position-free keys to their global positions, and back.

Source: Su et al., RoFormer (arXiv 2104.09864) in the half-split layout of Hugging Face's decoders.
The frequencies always come from the model's own rotary module. So every scaling that depends on
the position alone (default, linear, llama3, yarn) is right by construction. So is partial rotary:
channels beyond the rotated ones pass through. Scalings whose frequencies change with the total
length (dynamic NTK, longrope) cannot be stored position-free and are refused.

Deviation from the papers: they rotate in the model's dtype. Here tables and arithmetic are float32
and only the result is rounded, so that strip-then-place loses as little as possible.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from kvrag.errors import UnsupportedModelError
from kvrag.native import rotate

_LENGTH_DEPENDENT = ("dynamic", "longrope")


@dataclass(frozen=True)
class RotaryTable:
    """Cosines and sines of a run of positions, for one type of layer.

    Attributes
    ----------
    cos, sin
        ``[N, R]`` float32 for R rotated channels, multiplied by the model's attention scaling.
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def embeddings(
        self, rows: torch.Tensor | slice, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(cos, sin)`` ``[1, n, R]`` as the model's own layers expect them."""
        return self.cos[rows][None].to(dtype), self.sin[rows][None].to(dtype)

    def place(self, keys: torch.Tensor, rows: torch.Tensor | slice, out: torch.Tensor) -> None:
        """Rotate position-free `keys` to the positions of `rows`, and write them to `out`.

        Parameters
        ----------
        keys
            ``[..., n, D]``, any float dtype.
        rows
            The n rows of this table for their positions.
        out
            ``[..., n, D]`` in the model's dtype; must not overlap `keys`.
        """
        self._rotate(keys, self.cos[rows], self.sin[rows], out)

    def strip(self, keys: torch.Tensor, rows: torch.Tensor | slice, out: torch.Tensor) -> None:
        """Undo `place`: rotate back and divide by the attention scaling."""
        cos, sin = self.cos[rows], self.sin[rows]
        # R(p)^-1 = R(-p); cos and sin both carry the scaling s, so one division by
        # s^2 = cos^2 + sin^2 leaves the inverse of s R(p).
        square = cos.square() + sin.square()
        self._rotate(keys, cos / square, -sin / square, out)

    @staticmethod
    def _rotate(
        keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor
    ) -> None:
        if out.dtype == torch.float32:
            keys = keys.float()
        if rotate(keys, cos, sin, out):
            return
        num_rotated = cos.shape[-1]
        half = num_rotated // 2
        # Both halves of a row of the table hold the same frequencies.
        cos, sin = cos[:, :half], sin[:, :half]
        first, second = keys[..., :half], keys[..., half:num_rotated]
        if keys.dtype == out.dtype == torch.float32:
            out_first, out_second = out[..., :half], out[..., half:num_rotated]
            torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-1)
            torch.mul(second, cos, out=out_second).addcmul_(first, sin)
        else:
            first, second = first.float(), second.float()
            out[..., :half] = first * cos - second * sin
            out[..., half:num_rotated] = second * cos + first * sin
        if num_rotated < keys.shape[-1]:
            out[..., num_rotated:] = keys[..., num_rotated:]


class RotaryPositions:
    """The RoPE of one model, for all its layers.

    Parameters
    ----------
    rotary
        The model's own rotary module.
    layer_types
        For each layer, the type name that the rotary module needs (Gemma-3 has one set of
        frequencies per type), or None if the module takes no type.

    Raises
    ------
    UnsupportedModelError
        If the frequencies change with the total length.
    """

    def __init__(self, rotary: nn.Module, layer_types: Sequence[str | None]) -> None:
        rope_type = rotary.rope_type
        names = rope_type.values() if isinstance(rope_type, dict) else [rope_type]
        for name in names:
            if any(word in str(name) for word in _LENGTH_DEPENDENT):
                raise UnsupportedModelError(
                    f"RoPE scaling {name!r} changes its frequencies with the total length, so KV "
                    "cannot be stored position-free; supported: default, linear, llama3, yarn"
                )
        self._rotary = rotary
        self._layer_types = tuple(layer_types)

    def tables(self, positions: torch.Tensor) -> list[RotaryTable]:
        """Return one table per layer for `positions` ``[N]`` (layers of one type share theirs)."""
        # The module takes dtype and device from its first argument: float32 keeps full precision.
        probe = torch.empty(1, 1, dtype=torch.float32, device=positions.device)
        by_type: dict[str | None, RotaryTable] = {}
        for layer_type in dict.fromkeys(self._layer_types):
            arguments = () if layer_type is None else (layer_type,)
            cos, sin = self._rotary(probe, positions[None], *arguments)
            by_type[layer_type] = RotaryTable(cos[0].float(), sin[0].float())
        return [by_type[layer_type] for layer_type in self._layer_types]
