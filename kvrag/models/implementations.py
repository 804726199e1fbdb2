"""Our attention implementations, which replace a model's own for a while.

Transformers looks its attention up by the name in the model's configuration. Each of ours is
registered under two names: one falls back on `sdpa`, and one on the family's own eager function,
which alone knows its soft-capping.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

AttentionFunction = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]

_plain: dict[str, str] = {}
_functions: dict[str, AttentionFunction] = {}
_told: set[str] = set()


class OwnMask(ABC):
    """A mask that attends by itself, where a layer's attention is one of ours."""

    @abstractmethod
    def attend(
        self,
        plain: AttentionFunction,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        in_kernel: bool,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Return the output ``[1, n, heads, D]`` of a layer's attention.

        Parameters
        ----------
        plain
            The attention function for ordinary masks and a `RowMask`.
        module, query, key, value, kwargs
            What the layer gives to its attention function.
        in_kernel
            Whether the compiled kernel knows all that this layer's attention does.
        """


def sdpa_of_transformers(*given: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend as Transformers does."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward(*given, **kwargs)


def register_attention(
    name: str, over_sdpa: AttentionFunction, over_eager: AttentionFunction
) -> None:
    """Register an implementation as `name` and as ``name_eager``."""
    _plain.update({name: "sdpa", f"{name}_eager": "eager"})
    _functions.update({name: over_sdpa, f"{name}_eager": over_eager})


def _tell_transformers() -> None:
    """Let Transformers know our implementations, before one of its models attends by them."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask, sdpa_mask

    for name, function in _functions.items():
        if name not in _told:
            AttentionInterface.register(name, function)
            mask = sdpa_mask if _plain[name] == "sdpa" else eager_mask
            AttentionMaskInterface.register(name, mask)
            _told.add(name)


def own_attention(config: Any) -> AttentionFunction:
    """Return the implementation that a configuration names, which is one of ours."""
    return _functions[config._attn_implementation]


class AttentionCall(NamedTuple):
    """What a layer gives to its attention function, and the plain function."""

    plain: AttentionFunction
    module: nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    scaling: float | None
    more: Mapping[str, Any]

    def plainly(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return what the plain function does."""
        plain, *given, scaling, more = self
        return plain(*given, scaling=scaling, **more)


def register_around(
    name: str, attend: Callable[[AttentionCall], tuple[torch.Tensor, torch.Tensor | None]]
) -> None:
    """Register an implementation that may leave the work to the plain one."""

    def over(plain_of: Callable[[nn.Module], AttentionFunction]) -> AttentionFunction:
        def attention(
            module: nn.Module,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            attention_mask: torch.Tensor | None,
            scaling: float | None = None,
            **kwargs: Any,
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            given = module, query, key, value, attention_mask, scaling
            return attend(AttentionCall(plain_of(module), *given, kwargs))

        return attention

    register_attention(name, over(lambda _: sdpa_of_transformers), over(eager_function))


def plain_implementation(name: str) -> str:
    """Return the attention implementation that one of our names falls back on, or the name."""
    return _plain.get(name, name)


@contextmanager
def attending_by(model: Any, name: str) -> Iterator[None]:
    """Make `model` attend with the implementation registered as `name`. Hold its lock."""
    if len(_told) < len(_functions) and "transformers.modeling_utils" in sys.modules:
        _tell_transformers()
    config = model.config
    original = config._attn_implementation
    plain = plain_implementation(original)
    # Flash and flex kernels know soft-capping; among our implementations only the eager one does.
    capped = plain != "sdpa" and getattr(config, "attn_logit_softcapping", None) is not None
    config._attn_implementation = f"{name}_eager" if plain == "eager" or capped else name
    try:
        yield
    finally:
        config._attn_implementation = original


def eager_function(module: nn.Module) -> AttentionFunction:
    """Return the eager attention of the family that an attention module belongs to."""
    found: Any = sys.modules[type(module).__module__].__dict__["eager_attention_forward"]
    function: AttentionFunction = found
    return function
