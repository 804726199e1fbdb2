"""Keys that are placed later, those of all chunks at once.

On a GPU a call takes as long for ten chunks as for one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch

from kvrag.positions.rotary import RotaryTable


@dataclass(frozen=True)
class DeferredTable(RotaryTable):
    """A table that writes keys as they are, and places them in `finish`.

    Threads may write at the same time, each its own rows.

    Attributes
    ----------
    table
        The table that places them.
    written
        First and last row, exclusive, of what is not placed yet.
    """

    table: RotaryTable
    written: list[tuple[int, int]] = field(default_factory=list)

    @classmethod
    def of(cls, table: RotaryTable) -> DeferredTable:
        """Return a table that defers what `table` does."""
        return cls(table.cos, table.sin, table)

    def place(self, keys: torch.Tensor, rows: torch.Tensor | slice, out: torch.Tensor) -> None:
        """Write keys ``[H, n, D]`` to `out`, to be placed later at `rows`.

        If that would round them twice, or rows are not next to each other, they are placed at once.
        """
        if keys.dtype != out.dtype or not isinstance(rows, slice):
            self.table.place(keys, rows, out)
            return
        out.copy_(keys)
        self.written.append((rows.start, rows.stop))

    def finish(self, keys: torch.Tensor) -> None:
        """Place what was written.

        Parameters
        ----------
        keys
            ``[H, N, D]``: all rows that `out` was part of.
        """
        if not self.written:
            return
        rows = _indices(tuple(sorted(self.written)), keys.device)
        self.written.clear()
        placed = keys.new_empty(keys.shape[0], len(rows), keys.shape[2])
        self.table.place(keys[:, rows], rows, placed)
        keys.index_copy_(1, rows, placed)


@lru_cache(maxsize=4)
def _indices(ranges: Sequence[tuple[int, int]], device: torch.device) -> torch.Tensor:
    """Return the numbers in some ranges; all layers of a prompt have the same."""
    return torch.cat([torch.arange(*one) for one in ranges]).to(device)
