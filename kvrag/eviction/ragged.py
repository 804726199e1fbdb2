"""Keys and values of heads that keep different numbers of them, without gaps.

All rows of a layer are in one block of memory, head after head, with some room after each. When a
row is removed, its head's last row overwrites it. So rows are always dense and attention needs no
mask. Their order does not matter, since keys are already rotated to their positions. The block is
reallocated, smaller or larger, only once for every few dozen rows that are removed or added.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from kvrag.eviction.base import HeldKeys

# Free rows after each head's rows in a new block: enough that copying blocks costs little compared
# with reading them at every step.
STEP_ROWS = 64


class RaggedKV:
    """One layer's keys and values of A heads. Head a holds ``counts[a]`` of them.

    Parameters
    ----------
    keys, values
        ``[B, H, N, D]`` with B * H = A.
    held
        What a policy knows about them, in N slots. Only keys with ``held`` are kept.

    Attributes
    ----------
    counts, num_held
        How many keys each head holds: as a list, and as ``[A, 1]`` int64.
    notes
        What policies know about the keys. Its K slots are the heads' rows, in their order.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, held: HeldKeys) -> None:
        kept = [row.nonzero()[:, 0] for row in held.held]
        self.counts = [len(rows) for rows in kept]
        self.keys: torch.Tensor
        self.values: torch.Tensor
        self.num_held: torch.Tensor
        self._lay_out(keys, keys.shape[-1])
        num_slots = max(self._rooms)
        num_heads, device = len(kept), keys.device
        self.notes = HeldKeys(
            torch.zeros(num_heads, num_slots, dtype=torch.long, device=device),
            torch.arange(num_slots, device=device) < self.num_held,
            torch.zeros(num_heads, num_slots, device=device),
            held.num_seen.clone(),
            held.num_prompt.clone(),
            held.num_noted.clone(),
        )
        per_prompt = keys.shape[1]
        for head, (rows, count) in enumerate(zip(kept, self.counts, strict=True)):
            prompt, own = divmod(head, per_prompt)
            of_head = self._rows(head)
            torch.index_select(keys[prompt, own], 0, rows, out=self.keys[of_head])
            torch.index_select(values[prompt, own], 0, rows, out=self.values[of_head])
            self.notes.places[head, :count] = held.places[head, rows]
            self.notes.marks[head, :count] = held.marks[head, rows]

    @property
    def size_bytes(self) -> int:
        """Bytes allocated here, including free rows and notes."""
        notes = self.notes
        tensors = (self.keys, self.values, notes.places, notes.held, notes.marks)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Add one more key and value ``[A, D]`` to each head.

        Returns whether the block of memory was reallocated.
        """
        is_full = any(count == room for count, room in zip(self.counts, self._rooms, strict=True))
        if is_full:
            self._move()
        notes, slots = self.notes, self.num_held
        rows = self._starts_row + slots[:, 0]
        self.keys.index_copy_(0, rows, keys)
        self.values.index_copy_(0, rows, values)
        notes.places.scatter_(1, slots, notes.num_seen)
        notes.marks.scatter_(1, slots, 0.0)
        notes.held.scatter_(1, slots, True)
        notes.num_seen.add_(1)
        self.num_held.add_(1)
        self.counts = [count + 1 for count in self.counts]
        return is_full

    def remove(self, gone: torch.Tensor) -> bool:
        """Forget keys; return whether the block of memory was reallocated.

        Parameters
        ----------
        gone
            ``[A, k]`` bool: which of the first k slots to empty. Each must hold a key.
        """
        if not bool(gone.any()):
            return False
        notes = self.notes.first(gone.shape[1])
        left = self.num_held - gone.sum(1, keepdim=True)
        behind = torch.arange(gone.shape[1], device=gone.device) >= left
        # Each head has as many keys after its new end as it has holes before it.
        holes = (gone & ~behind).nonzero(as_tuple=True)
        movers = (notes.held & ~gone & behind).nonzero(as_tuple=True)
        if len(holes[0]):
            into = self._starts_row[holes[0]] + holes[1]
            out_of = self._starts_row[movers[0]] + movers[1]
            for rows in (self.keys, self.values):
                rows.index_copy_(0, into, rows[out_of])
            for note in (notes.places, notes.marks):
                note[holes] = note[movers]
        notes.held.logical_and_(~behind)
        self.num_held = left
        self.counts = left[:, 0].tolist()
        num_held = sum(self.counts)
        if sum(self._rooms) - num_held > max(2 * STEP_ROWS * len(self.counts), num_held // 4):
            self._move()
            return True
        return False

    def head(self, head: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return one head's keys and values, ``[counts[head], D]`` each, as views."""
        rows = self._rows(head)
        return self.keys[rows], self.values[rows]

    def kept(self) -> list[torch.Tensor]:
        """Return the tokens that each head holds, ascending; heads are ordered by prompt."""
        return [
            places[held].sort().values
            for places, held in zip(self.notes.places, self.notes.held, strict=True)
        ]

    def _rows(self, head: int) -> slice:
        start = self._starts[head]
        return slice(start, start + self.counts[head])

    def _lay_out(self, like: torch.Tensor, head_dim: int) -> None:
        self._rooms = [count + STEP_ROWS for count in self.counts]
        self._starts = [sum(self._rooms[:head]) for head in range(len(self._rooms))]
        self._starts_row = torch.tensor(self._starts, device=like.device)
        self.num_held = torch.tensor(self.counts, device=like.device)[:, None]
        self.keys = like.new_empty(sum(self._rooms), head_dim)
        self.values = torch.empty_like(self.keys)

    def _move(self) -> None:
        """Reallocate the block, with the same free room after each head."""
        old = [self.head(head) for head in range(len(self.counts))]
        self._lay_out(self.keys, self.keys.shape[1])
        for head, (keys, values) in enumerate(old):
            new_keys, new_values = self.head(head)
            new_keys.copy_(keys)
            new_values.copy_(values)
        notes, num_slots = self.notes, max(self._rooms)
        shared = min(num_slots, notes.places.shape[1])

        def moved(note: torch.Tensor) -> torch.Tensor:
            new = note.new_zeros(len(self.counts), num_slots)
            new[:, :shared] = note[:, :shared]
            return new

        self.notes = replace(
            notes, places=moved(notes.places), held=moved(notes.held), marks=moved(notes.marks)
        )
