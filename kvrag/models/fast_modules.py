"""Lets a model's modules compute by kernels, inside a block.

The modules' parameters and the model's own forward pass stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch import nn

from kvrag.models.elements import element_forwards
from kvrag.models.linears import Forward, linear_forwards

_Modules = list[tuple[dict[str, Any], Forward]]

_modules: WeakKeyDictionary[nn.Module, dict[tuple[str, bool, int | None], _Modules]] = (
    WeakKeyDictionary()
)

# What this module has put into modules, to tell it from what others put there.
_ours: WeakSet[Forward] = WeakSet()


@contextmanager
def fast_modules(
    model: nn.Module, precision: str, *, each_row: bool = False, besides: nn.Module | None = None
) -> Iterator[None]:
    """Let a model's modules on the CPU use kernels inside the block.

    Those are its linear layers, and the norms and MLPs that kernels compute; others, such as
    quantised layers, and those whose ``forward`` somebody replaced, stay as they are. Hold the
    model's lock, and compute without gradients. Which kernel computes a module depends on the
    number of rows alone, so equal calls give equal bits.

    Parameters
    ----------
    model
        The model, or a part of it. At its first call with many rows, each linear layer
        copies its weights in another layout; the copies live as long as the model.
    precision
        What the modules compute in: ``"float32"``, ``"bfloat16"``, ``"int8"`` or ``"int4"``. Their
        inputs and outputs keep the weights' type. The output embeddings compute in that type unless
        it is one of the last two.
    each_row
        Whether rows that belong to different prompts, `MAX_ROWS` at most, are computed as each
        would be alone, bit for bit, where the modules compute in the weights' type.
    besides
        A part of the model that stays as it is; None: no part does.
    """
    known = _modules.setdefault(model, {})
    kind = precision, each_row, None if besides is None else id(besides)
    modules = known.get(kind)
    if modules is None:
        left_out = set() if besides is None else set(besides.modules())
        found = chain(linear_forwards(model, precision, each_row=each_row), element_forwards(model))
        modules = known[kind] = [
            (vars(module), forward) for module, forward in found if module not in left_out
        ]
        _ours.update(forward for _, forward in modules)
    # Past `nn.Module.__setattr__`, which takes longer than the layers of a token.
    before = [own.get("forward") for own, _ in modules]
    try:
        for (own, forward), original in zip(modules, before, strict=True):
            # What somebody else put there stays.
            if original is None or (isinstance(original, FunctionType) and original in _ours):
                own["forward"] = forward
        yield
    finally:
        for (own, _), original in zip(modules, before, strict=True):
            if original is None:
                own.pop("forward", None)
            else:
                own["forward"] = original
