"""Several workers, one model: each takes its own rows, gradients are averaged every step."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist


def join_workers(folder: Path, rank: int, num_workers: int) -> None:
    """Meet the other workers of a run; does nothing when there is one worker."""
    if num_workers > 1:
        meeting = (folder / "rendezvous").resolve()
        dist.init_process_group(
            "gloo", init_method=f"file://{meeting}", rank=rank, world_size=num_workers
        )


def average_over_workers(
    parameters: Iterable[torch.nn.Parameter], values: list[float]
) -> list[float]:
    """Average the gradients of `parameters` in place, and `values`, over all workers."""
    if not dist.is_initialized():
        return values
    gradients = [p.grad for p in parameters if p.grad is not None]
    flat = torch.cat([g.flatten() for g in gradients] + [torch.tensor(values)])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    start = 0
    for gradient in gradients:
        gradient.copy_(flat[start : start + gradient.numel()].view_as(gradient))
        start += gradient.numel()
    return [float(value) for value in flat[start:]]
