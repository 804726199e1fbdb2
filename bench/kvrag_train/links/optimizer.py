"""The optimizer: KVLink §4.1's AdamW, a rate that rises and falls, and gradient clipping."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from kvrag_train.links.options import LinkTrainingOptions
from kvrag_train.links.processes import Processes
from kvrag_train.links.sharding import whole

# It is looked up by rows, and learns at a higher rate.
_TABLE = "links/embeddings"


def new_optimizer(
    trained: Mapping[str, nn.Parameter], options: LinkTrainingOptions
) -> torch.optim.Optimizer:
    """Return AdamW over the parameters, by name; ``"rate"`` of each group is its peak rate."""
    groups = [
        {"params": [w for name, w in trained.items() if (name == _TABLE) is own], "rate": rate}
        for own, rate in ((True, options.link_learning_rate), (False, options.rate))
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=options.rate,
        betas=(0.9, 0.999),
        weight_decay=0.0,
    )


def rate_factor(step: int, steps: int, warmup_steps: int) -> float:
    """Return the share of the peak rate: a linear rise, then half a cosine."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, steps - warmup_steps)
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def average_and_clip(
    weights: Sequence[nn.Parameter], processes: Processes, max_norm: float
) -> None:
    """Average gradients over processes, and scale them so that the norm of all is `max_norm` at
    most.

    Those of weights that are held in parts have been averaged where they came about.
    """
    replicated = [weight for weight in weights if not isinstance(weight, DTensor)]
    sharded = [weight for weight in weights if isinstance(weight, DTensor)]
    processes.average_gradients(replicated)
    # One by one where the scale is one tensor and gradients are in parts: no kernel takes both.
    parts = [(part, foreach) for part, foreach in ((replicated, None), (sharded, False)) if part]
    norms = [
        whole(
            nn.utils.get_total_norm([w.grad for w in part if w.grad is not None], foreach=foreach)
        )
        for part, foreach in parts
    ]
    norm = norms[0] if len(norms) == 1 else torch.stack(norms).norm()
    for part, foreach in parts:
        nn.utils.clip_grads_with_norm_(part, max_norm, norm, foreach)
