"""Several workers, one model: each takes its own rows, gradients are averaged every step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

_BUCKET_ELEMENTS = 1 << 23
"""Sent at once: enough to be worth a message, little beside the gradients themselves."""


def join_workers(folder: Path, rank: int, num_workers: int) -> None:
    """Meet the other workers of a run; does nothing when there is one worker."""
    if num_workers > 1:
        meeting = (folder / "rendezvous").resolve()
        dist.init_process_group(
            "gloo", init_method=f"file://{meeting}", rank=rank, world_size=num_workers
        )


def average_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Average the gradients of `parameters` in place, over all workers.

    All workers have gradients of the same parameters.
    """
    for bucket in _buckets([p.grad for p in parameters if p.grad is not None]):
        flat = torch.cat([gradient.flatten() for gradient in bucket])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        parts = torch.split(flat, [gradient.numel() for gradient in bucket])
        for gradient, part in zip(bucket, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


def average_over_workers(
    parameters: Iterable[torch.nn.Parameter], values: list[float]
) -> list[float]:
    """Average the gradients of `parameters` in place, and `values`, over all workers."""
    if not dist.is_initialized():
        return values
    average_gradients(parameters)
    means = torch.tensor(values)
    dist.all_reduce(means)
    return [float(value) for value in means / dist.get_world_size()]


def _buckets(gradients: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    bucket: list[torch.Tensor] = []
    size = 0
    for gradient in gradients:
        # One message is of one type and on one device.
        is_like = not bucket or (
            (gradient.dtype, gradient.device) == (bucket[0].dtype, bucket[0].device)
        )
        if bucket and (not is_like or size + gradient.numel() > _BUCKET_ELEMENTS):
            yield bucket
            bucket, size = [], 0
        bucket.append(gradient)
        size += gradient.numel()
    if bucket:
        yield bucket
