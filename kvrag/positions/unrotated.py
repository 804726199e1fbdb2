"""Keys without rotation, for models with positions in their inputs or in a bias of attention.

Source of the bias: Press et al., ALiBi (arXiv 2108.12409) §3. The model's own function computes it
at the rows' positions, so gaps between positions count as distance. With a bias, keys are valid at
any position; with learned positions, only at one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from kvrag.positions.rotary import RotaryTable


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
