"""A model's norms and MLPs on the CPU, each number by number in one pass.

Only classes of Transformers whose arithmetic, roundings included, is the kernels' own are computed
so. They are known by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import ref

import torch
from torch import is_grad_enabled, nn
from torch.nn.modules.module import _has_any_global_hook

from kvrag.native.attention import ATTENTION_TYPES
from kvrag.native.reconstruction import gated, rms_norm

_T = TypeVar("_T")
_Forward = Callable[..., torch.Tensor]

HOME = "transformers.models."
"""Where the classes are from."""
_AUTHORS = ("transformers.", "torch.", "kvrag.models.decoders", "kvrag.models.small")

NORMS = {
    **dict.fromkeys(
        ("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm", "Phi3RMSNorm"),
        (False, "variance_epsilon"),
    ),
    **dict.fromkeys(("Gemma2RMSNorm", "Gemma3RMSNorm"), (True, "eps")),
}
"""Whether a norm adds 1 to its weights, and how its epsilon is called."""


@dataclass(frozen=True)
class Kind:
    """How a family's layers are put together.

    Attributes
    ----------
    norms
        A layer's norms, in the order in which they are used.
    head_norms
        Whether attention has norms of queries and keys.
    caps
        Whether attention caps its scores as its ``attn_logit_softcapping`` says.
    """

    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    head_norms: bool = False
    caps: bool = False

    def around(self, norms: Sequence[_T]) -> tuple[Sequence[_T], Sequence[_T | None]]:
        """Return the norms before attention and MLP, and those after them, if there are any."""
        return (norms[::2], norms[1::2]) if len(norms) > 2 else (norms, [None, None])


_FOUR_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
KINDS = {
    "Llama": Kind(),
    "Mistral": Kind(),
    "Qwen2": Kind(),
    "Qwen3": Kind(head_norms=True),
    "Gemma2": Kind(norms=_FOUR_NORMS, caps=True),
    "Gemma3": Kind(norms=_FOUR_NORMS, head_norms=True),
}
"""The families whose layers are known, by the beginning of their classes' names."""

_MLPS = {"LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP", "Gemma2MLP", "Gemma3MLP"}
ACTIVATIONS = {"SiLU": False, "SiLUActivation": False, "GELUTanh": True, "PytorchGELUTanh": True}
"""Whether an activation is GELU as approximated by tanh.

Older versions of Transformers have the second name for it.
"""


def element_forwards(model: nn.Module) -> Iterator[tuple[nn.Module, _Forward]]:
    """Yield a model's norms and MLPs that kernels compute, each with what computes it.

    What is yielded calls an MLP's linear layers as modules, hooks included. Where gradients are on,
    or inputs are of another type or device than a kernel takes, the module's own code computes.
    """
    for module in model.modules():
        name = type(module).__name__
        if not type(module).__module__.startswith(HOME) or is_patched(type(module)):
            continue
        if name in NORMS:
            yield module, _norm(module, *NORMS[name])
        elif name in _MLPS:
            activation: Any = getattr(module, "act_fn", None)
            is_gelu = ACTIVATIONS.get(type(activation).__name__)
            if is_gelu is not None:
                yield module, _mlp(module, activation, is_gelu=is_gelu)


def _norm(module: nn.Module, adds_one: bool, epsilon: str) -> _Forward:
    own, kind, plain = ref(module), type(module), type(module).forward
    parameters, state = module._parameters, vars(module)

    def forward(*given: Any, **named: Any) -> torch.Tensor:
        weight = parameters["weight"]
        if len(given) == 1 and not named and weight is not None:
            (rows,) = given
            if (
                rows.dtype == weight.dtype
                and rows.shape[-1:] == weight.shape
                and _is_ours(rows)
                and _is_ours(weight)
                and kind.forward is plain
            ):
                return rms_norm(rows, weight, state[epsilon], adds_one=adds_one)
        made: torch.Tensor = kind.forward(own(), *given, **named)
        return made

    return forward


def _mlp(module: nn.Module, activation: nn.Module, *, is_gelu: bool) -> _Forward:
    reference, kind, plain = ref(module), type(module), type(module).forward

    def forward(*given: Any, **named: Any) -> torch.Tensor:
        own: Any = reference()
        made: torch.Tensor
        if (
            len(given) != 1
            or named
            or not _is_ours(given[0])
            or own.act_fn is not activation
            or is_replaced(activation)
            or kind.forward is not plain
        ):
            made = kind.forward(own, *given, **named)
            return made
        (rows,) = given
        opening, passing = own.gate_proj(rows), own.up_proj(rows)
        # Layers that are not plain ones may give another type.
        if opening.dtype == passing.dtype and _is_ours(opening):
            made = own.down_proj(gated(opening, passing, is_gelu=is_gelu))
        else:
            made = own.down_proj(activation(opening) * passing)
        return made

    return forward


def is_replaced(module: nn.Module) -> bool:
    """Return whether a module's forward is not, or not only, the one its class was written with."""
    return is_hooked(module) or is_patched(type(module))


def is_hooked(module: nn.Module) -> bool:
    """Return whether a module itself, not its class, has a forward or hooks."""
    return "forward" in vars(module) or bool(module._forward_hooks or module._forward_pre_hooks)


def state_of(*models: nn.Module) -> tuple[object, ...]:
    """Return what modules compute, as far as it can change: their parts, code and weights' places.

    Two states are equal if nothing that is noted here has changed. Numbers that are written into
    the same memory do not count.
    """
    modules = list(models)
    # There may be thousands of modules, before each prompt: each list is made without calls.
    for module in modules:  # also those that are added here
        if parts := module._modules:
            modules += filter(None, parts.values())
    owns = list(map(vars, modules))
    kinds: list[Any] = list(map(type, modules))
    return (
        list(map(id, modules)),
        kinds,
        {kind: kind.forward for kind in set(kinds)},
        [own["training"] for own in owns],
        [own.get("forward") for own in owns],
        [
            (number, str(own.get("_active_adapter")), own.get("_disable_adapters"))
            for number, own in enumerate(owns)
            if "_active_adapter" in own or "_disable_adapters" in own  # flags of PEFT's
        ],
        [bool(own["_forward_hooks"] or own["_forward_pre_hooks"]) for own in owns],
        [
            part.data_ptr()
            for own in owns
            for parts in (own["_parameters"], own["_buffers"])
            if parts
            for part in parts.values()
            if part is not None
        ],
    )


def has_global_hooks() -> bool:
    """Return whether hooks act on all modules of the process."""
    return bool(_has_any_global_hook())  # type: ignore[no-untyped-call]


def is_patched(kind: type[nn.Module]) -> bool:
    """Return whether a class's forward comes from elsewhere."""
    function: Any = kind.forward
    if function.__module__ != kind.__module__:
        return True
    # A wrapper may bear the name of what it wraps. Decorators of Transformers and torch wrap, too.
    while function is not None:
        written = getattr(function, "__globals__", {}).get("__name__") or ""
        if not written.startswith(_AUTHORS):
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def _is_ours(numbers: torch.Tensor) -> bool:
    return (
        numbers.dtype in ATTENTION_TYPES and numbers.device.type == "cpu" and not is_grad_enabled()
    )
