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

from kvrag.native.attention import Scores

AttentionFunction = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]

_plain: dict[str, str] = {}
_functions: dict[str, AttentionFunction] = {}
_told: set[str] = set()


def sdpa_of_transformers(*given: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend as Transformers does."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward(*given, **kwargs)


class AttentionCall(NamedTuple):
    """What a layer gives to its attention function, and the plain function.

    Attributes
    ----------
    plain
        Of Transformers, or of the model's family.
    is_eager
        Whether it is the family's, which alone knows soft caps and sinks.
    """

    plain: AttentionFunction
    is_eager: bool
    module: nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: Any
    scaling: float | None
    more: Mapping[str, Any]

    def plainly(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return what the plain function does."""
        plain, _, *given, scaling, more = self
        return plain(*given, scaling=scaling, **more)

    @property
    def scores(self) -> Scores:
        """How the layer weighs keys."""
        scale = self.query.shape[-1] ** -0.5 if self.scaling is None else self.scaling
        return Scores(scale, self.more.get("softcap") or 0.0)

    @property
    def sinks(self) -> torch.Tensor | None:
        """The score of what each head sees besides keys, if the model has one."""
        return self.more.get("s_aux")

    @property
    def in_kernel(self) -> bool:
        """Whether the compiled kernel knows all that this layer's attention does."""
        return (self.more.get("softcap") is not None) is self.is_eager and self.sinks is None


class OwnMask(ABC):
    """A mask that attends by itself, where a layer's attention is one of ours."""

    @abstractmethod
    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Return the output ``[1, n, heads, D]`` of a layer's attention."""


def register_around(
    name: str, attend: Callable[[AttentionCall], tuple[torch.Tensor, torch.Tensor | None]]
) -> None:
    """Register an implementation as `name` over ``sdpa``, and as ``name_eager``."""

    def over(is_eager: bool) -> AttentionFunction:
        def attention(
            module: nn.Module,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            attention_mask: Any,
            scaling: float | None = None,
            **kwargs: Any,
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            plain = eager_function(module) if is_eager else sdpa_of_transformers
            given = module, query, key, value, attention_mask, scaling
            return attend(AttentionCall(plain, is_eager, *given, kwargs))

        return attention

    _plain.update({name: "sdpa", f"{name}_eager": "eager"})
    _functions.update({name: over(False), f"{name}_eager": over(True)})


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


@contextmanager
def attending_by(model: Any, name: str) -> Iterator[None]:
    """Make `model` attend with the implementation registered as `name`. Hold its lock."""
    if len(_told) < len(_functions) and "transformers.modeling_utils" in sys.modules:
        _tell_transformers()
    config = model.config
    original = config._attn_implementation
    plain = _plain.get(original, original)
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
