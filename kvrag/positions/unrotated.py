"""Keys without rotation: models whose positions are in the inputs, or in a bias of attention.

Source of the bias: Press et al., ALiBi (arXiv 2108.12409) §3. It is always the model's own
function's, evaluated at the positions that rows have, so gaps between positions count as distance.
Keys then hold for any position; with learned positions they hold for one alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvrag.positions.rotary import RotaryTable


@dataclass(frozen=True)
class AlibiTable(RotaryTable):
    """A table that rotates nothing, with the bias of each row as a key.

    Attributes
    ----------
    bias
        ``[heads, N]``, as the model's own function gives it.
    """

    bias: torch.Tensor


class UnrotatedPositions:
    """Positions that leave keys as they are.

    Parameters
    ----------
    num_layers, head_dim
        L and D.
    bias
        From a number of positions to the model's bias of them, ``[heads, positions]``; None where
        it has none.
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
        # Turning by nothing gives keys back bit for bit, in whatever kernel places them.
        shape = (len(positions), self._head_dim)
        cos = torch.ones(1, device=positions.device).expand(shape)
        sin = torch.zeros(1, device=positions.device).expand(shape)
        table = RotaryTable(cos, sin)
        if self._bias is not None:
            num_positions = int(positions.max()) + 1
            bias = self._bias(num_positions).to(positions.device)[:, positions]
            table = AlibiTable(cos, sin, bias)
        return [table] * self._num_layers
