"""A worker's part of an engine: some key heads (tensor parallelism), some layers (pipeline)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch import distributed

from kvrag.models.ranks import ALONE, Ranks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# A rank may wait for another one's reads. One that waits longer gives up, and the engine computes.
_PATIENCE = timedelta(seconds=300)


class GroupRanks(Ranks):
    """Workers that are connected through a separate process group.

    vLLM's own groups serve the thread that runs the engine's steps. Prompts are fused in another
    thread, whose exchanges must not come between those.

    Parameters
    ----------
    members
        Global numbers of the workers, this one's among them; each of them makes this call.
    device
        The device of what is summed.
    """

    def __init__(self, members: Sequence[int], device: torch.device) -> None:
        backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"
        self._group: ProcessGroup = distributed.new_group(
            list(members), timeout=_PATIENCE, backend=backend, use_local_synchronization=True
        )
        self.size = len(members)
        self.rank = list(members).index(distributed.get_rank())

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """Return the sum of all workers' tensors, in the memory of `part`."""
        whole = part.contiguous()
        distributed.all_reduce(whole, group=self._group)
        return whole

    def most(self, numbers: Sequence[int]) -> list[int]:
        """Return the greatest number that a worker has in each place."""
        told = torch.tensor(numbers, dtype=torch.int64)
        distributed.all_reduce(told, distributed.ReduceOp.MAX, group=self._group)
        return [int(number) for number in told]


@dataclass(frozen=True)
class Part:
    """What one worker of an engine has.

    Attributes
    ----------
    heads
        The workers that share the heads of this one's layers.
    workers
        All workers of the engine.
    """

    heads: Ranks = field(default=ALONE)
    workers: Ranks = field(default=ALONE)

    def head_range(self, num_kv_heads: int) -> slice:
        """Return this worker's key heads, of all that the model has."""
        each = num_kv_heads // self.heads.size
        return slice(self.heads.rank * each, (self.heads.rank + 1) * each)


def connected_part(device: torch.device) -> Part:
    """Return this worker's part, and connect it with the other workers, which all call this."""
    from vllm.distributed import parallel_state

    heads, workers = parallel_state.get_tp_group(), parallel_state.get_world_group()
    if workers.world_size == 1:
        return Part()
    return Part(
        ALONE if heads.world_size == 1 else GroupRanks(heads.ranks, device),
        GroupRanks(workers.ranks, device),
    )
