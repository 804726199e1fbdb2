"""RoPE: rotates position-free keys to their global positions, and back. Others turn nothing.

Source: Su et al., RoFormer (arXiv 2104.09864), in both layouts of Hugging Face's decoders: a
channel turns with the one half a head further (halves), or with its neighbour (pairs). Some layers
turn nothing. The frequencies always come from the model's own rotary module. So every scaling that
depends on the position alone (default, linear, llama3, yarn) is right by construction. So is
partial rotary: channels beyond the rotated ones pass through. longrope has two sets of frequencies;
only prompts of the shorter one are taken. Scalings that change with each length (dynamic NTK)
cannot be stored position-free and are refused.

Deviation from the papers: they rotate in the model's dtype. Here tables and arithmetic are float32
and only the result is rounded, so that strip-then-place loses as little as possible.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from kvrag.errors import UnsupportedModelError
from kvrag.native.reconstruction import rotate


@dataclass(frozen=True)
class RotaryTable:
    """Cosines and sines of a run of positions, for one type of layer.

    Attributes
    ----------
    cos, sin
        ``[N, R]`` float32 for R rotated channels, multiplied by the model's attention scaling. Both
        halves of a row hold the same numbers.
    in_pairs
        Whether neighbouring channels turn together, not those that are half of R apart.
    own
        What the model's rotary module gives its layers for the N positions, if that is not `cos`
        and `sin`: two tensors, or a complex one.
    positions
        ``[N]``: the positions, for layers that may use them besides turning; None: no layer does.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    in_pairs: bool = field(default=False, kw_only=True)
    own: tuple[torch.Tensor, ...] = field(default=(), kw_only=True)
    positions: torch.Tensor | None = field(default=None, kw_only=True)

    @property
    def is_plain(self) -> bool:
        """Whether this is all about positions, in the form that kernels of whole layers know."""
        return type(self) is RotaryTable and not (self.in_pairs or self.own)

    def embeddings(self, rows: torch.Tensor | slice, dtype: torch.dtype) -> Any:
        """Return ``(cos, sin)`` ``[1, n, R]``, or whatever else the model's own layers expect."""
        given = [part[rows][None] for part in self.own or (self.cos, self.sin)]
        if given[0].is_complex():
            return given[0]
        return tuple(part.to(dtype) for part in given)

    def at(self, rows: torch.Tensor | slice) -> RotaryTable:
        """Return the table of some of the positions, which rotates alike."""
        return RotaryTable(self.cos[rows], self.sin[rows], in_pairs=self.in_pairs)

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

    def _rotate(
        self, keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor
    ) -> None:
        if out.dtype == torch.float32:
            keys = keys.float()
        if not self.in_pairs and rotate(keys, cos, sin, out):
            return
        num_rotated = cos.shape[-1]
        half = num_rotated // 2
        # Both halves of a row of the table hold the same frequencies.
        cos, sin = cos[:, :half], sin[:, :half]
        one, other = slice(0, half), slice(half, num_rotated)
        if self.in_pairs:
            one, other = slice(0, num_rotated, 2), slice(1, num_rotated, 2)
        first, second = keys[..., one], keys[..., other]
        if keys.dtype == out.dtype == torch.float32:
            out_first, out_second = out[..., one], out[..., other]
            torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-1)
            torch.mul(second, cos, out=out_second).addcmul_(first, sin)
        else:
            first, second = first.float(), second.float()
            out[..., one] = first * cos - second * sin
            out[..., other] = second * cos + first * sin
        if num_rotated < keys.shape[-1]:
            out[..., num_rotated:] = keys[..., num_rotated:]


@dataclass(frozen=True)
class Layout:
    """How a layer's keys are rotated by what the model's rotary module gives.

    Attributes
    ----------
    form
        How the module repeats its frequencies: ``"halves"`` (once more after them), ``"pairs"``
        (each twice) or ``"once"``.
    in_pairs
        See `RotaryTable`.
    turns
        Whether the layer rotates at all.
    """

    form: str = "halves"
    in_pairs: bool = False
    turns: bool = True

    def table(self, given: tuple[torch.Tensor, ...]) -> RotaryTable:
        """Return the table of what a rotary module gave: cosines and sines, or complex numbers."""
        own = tuple(part[0] for part in given)
        cos, sin = (own[0].real, own[0].imag) if own[0].is_complex() else own
        if self.form == "halves" and not self.in_pairs and self.turns:
            return RotaryTable(cos.float(), sin.float())
        every = slice(0, None, 2) if self.form == "pairs" else slice(0, cos.shape[-1] // 2)
        cos, sin = (
            (part if self.form == "once" else part[:, every]).float().repeat(1, 2)
            for part in (cos, sin)
        )
        if not self.turns:  # a rotation by 0 keeps keys bit for bit
            cos, sin = torch.ones_like(cos), torch.zeros_like(sin)
        return RotaryTable(cos, sin, in_pairs=self.in_pairs, own=own)


LAYOUTS = (
    Layout(),
    Layout("halves", in_pairs=True),
    Layout("pairs", in_pairs=True),
    Layout("once"),
    Layout("once", in_pairs=True),
    Layout(turns=False),
)
"""What is understood."""


class RotaryPositions:
    """The RoPE of one model, for all its layers.

    Parameters
    ----------
    rotary
        The model's own rotary module.
    layer_types
        For each layer, the type name that the rotary module needs (Gemma-3 has one set of
        frequencies per type), or None if the module takes no type.
    layouts
        How each layer is rotated; None: all in halves.

    Raises
    ------
    UnsupportedModelError
        If the module does not say how it makes its frequencies.
    """

    def __init__(
        self,
        rotary: nn.Module,
        layer_types: Sequence[str | None],
        layouts: Sequence[Layout] | None = None,
    ) -> None:
        if getattr(rotary, "rope_type", None) is None:
            raise UnsupportedModelError(
                "the model's rotary module does not say how it makes its frequencies (rope_type), "
                "so KV cannot be stored position-free; take a newer model, such as llama or qwen3"
            )
        self._rotary = rotary
        self._is_measured = layouts is not None
        layers = list(zip(layer_types, layouts or [Layout()] * len(layer_types), strict=True))
        self._kinds = list(dict.fromkeys(layers))
        self._numbers = [self._kinds.index(one) for one in layers]

    def given(
        self, positions: torch.Tensor, layer_type: str | None, dtype: torch.dtype = torch.float32
    ) -> tuple[torch.Tensor, ...]:
        """Return what the model's module gives layers of a type, for `positions` ``[N]``."""
        # The module takes dtype and device from its first argument.
        probe = torch.empty(1, 1, dtype=dtype, device=positions.device)
        arguments = () if layer_type is None else (layer_type,)
        given = self._rotary(probe, positions[None], *arguments)
        return (given,) if isinstance(given, torch.Tensor) else tuple(given)

    def tables(self, positions: torch.Tensor) -> list[RotaryTable]:
        """Return one table per layer for `positions` ``[N]`` (layers of one kind share theirs)."""
        made = [
            layout.table(self.given(positions, layer_type)) for layer_type, layout in self._kinds
        ]
        if self._is_measured:
            made = [replace(table, positions=positions) for table in made]
        return [made[number] for number in self._numbers]


@dataclass(frozen=True)
class AlibiTable(RotaryTable):
    """A table that does not rotate, with the bias of each row as a key.

    Attributes
    ----------
    bias
        ``[heads, N]``, from the model's own function.
    """

    bias: torch.Tensor = field(kw_only=True)


class UnrotatedPositions:
    """Positions that leave keys as they are.

    Parameters
    ----------
    num_layers, head_dim
        L and D.
    bias
        Returns the model's bias ``[heads, positions]`` for a number of positions. None for a model
        without bias.
    """

    def __init__(
        self,
        num_layers: int,
        head_dim: int,
        bias: Callable[[int], torch.Tensor] | None = None,
    ) -> None:
        self._num_layers = num_layers
        self._head_dim = head_dim
        self._bias = bias

    def tables(self, positions: torch.Tensor) -> list[RotaryTable]:
        """Return one table per layer, all the same, for `positions` ``[N]``."""
        # A rotation by 0 keeps keys bit for bit, in any kernel.
        shape = (len(positions), self._head_dim)
        cos = torch.ones(1, device=positions.device).expand(shape)
        sin = torch.zeros(1, device=positions.device).expand(shape)
        table = RotaryTable(cos, sin)
        if self._bias is not None:
            num_positions = int(positions.max()) + 1
            bias = self._bias(num_positions).to(positions.device)[:, positions]
            table = AlibiTable(cos, sin, bias=bias)
        return [table] * self._num_layers
