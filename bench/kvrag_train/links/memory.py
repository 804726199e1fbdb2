"""Saving memory in the training of large models: bfloat16, and layers computed twice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

AUTO = "auto"
PRECISIONS = (AUTO, "float32", "bfloat16")


def chosen_precision(precision: str, device: torch.device) -> str:
    """Return the precision to compute in; ``"auto"`` is bfloat16 if the device is made for it.

    A CPU has it as a type, and is seldom faster with it: there ``"auto"`` is float32.
    """
    if precision != AUTO:
        return precision
    has_it = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return "bfloat16" if has_it else "float32"


def computing_in(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which products are computed in a precision; weights keep their own."""
    if precision == "bfloat16":
        return torch.autocast(device.type, torch.bfloat16)
    return nullcontext()


@contextmanager
def checkpointed_layers(hf: PreTrainedModel) -> Iterator[None]:
    """Keep only the inputs of decoder layers for the backward pass, which computes them again.

    Source: Chen et al., arXiv 1604.06174. Deviation from Transformers' own switch: that one takes
    the cache away from the layers, in which documents are handed on here.
    """
    layers: Any = hf.base_model.layers
    with ExitStack() as restoring:
        for layer in layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
            restoring.callback(delattr, layer, "forward")
        yield
