"""A model of which each process holds a part: weights, gradients and moments (FSDP).

Source: Rajbhandari et al., arXiv 1910.02054 (stage 3), as torch's ``fully_shard`` does it: layer by
layer, weights are gathered before a forward or backward and freed after it. It does so in hooks on
modules, which look at inputs and outputs; a student's computation bypasses them in two ways.

- K/V of documents leave their layer through a cache, and gradients come back through them, for the
  last layer through them alone. Here a layer's K/V are therefore among its outputs while the hooks
  look.
- Embeddings, final norm and head are called on their own, twice in a step, and head and embeddings
  may be one tensor. Here they belong to one root, whose forward is all that a student runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from kvrag.models.caches import CaptureCache
from kvrag.models.families import find_family
from kvrag_train.links.processes import Processes

Running = Callable[[Callable[[], torch.Tensor]], torch.Tensor]
"""Calls its argument while the weights that it needs are available."""


def shard(hf: PreTrainedModel, processes: Processes, *, learns: bool, precision: str) -> Running:
    """Leave each process its part of a model's weights.

    Parameters
    ----------
    hf
        The model, changed in place: its parameters become DTensors on the processes' devices, under
        their names. The main process's weights count; others may have none (the meta device).
    processes
        Which share it.
    learns
        Whether its weights get gradients.
    precision
        Of products while it learns; layers are then gathered in it.

    Returns
    -------
    Running
        What all forwards of the model have to be run by. All processes run the same ones.
    """
    assert processes.device is not None
    hf.requires_grad_(learns)
    mesh = init_device_mesh(processes.device.type, (processes.count,))
    family = find_family(hf)
    policy = MixedPrecisionPolicy()
    if learns and precision == "bfloat16":
        # Rounded before they travel and not by every product, whose copies would outlive the layer.
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for index, layer in enumerate(getattr(hf.base_model, family.layers)):
        _receive(layer, processes)
        layer.register_forward_hook(_put_out(index, family.cache_argument), with_kwargs=True)
        fully_shard(
            layer, mesh=mesh, reshard_after_forward=processes.frees_layers, mp_policy=policy
        )
        layer.register_forward_hook(_take_in)
    root = _Root(hf)
    _receive(root, processes)
    fully_shard(root, mesh=mesh, reshard_after_forward=processes.frees_layers)
    return root


class _Root(nn.Module):
    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__()
        self.hf = hf

    def forward(self, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        return run()


def _receive(module: nn.Module, processes: Processes) -> None:
    """Put the main process's weights into a module, except for those already shared.

    A layer at a time, so that no process but that one ever holds more of them.
    """
    received: dict[torch.Tensor, torch.Tensor] = {}  # by identity: tied weights stay one tensor
    for owner in module.modules():
        for name, tensor in (*owner._parameters.items(), *owner._buffers.items()):
            if tensor is None or isinstance(tensor, DTensor):
                continue
            if name in owner._non_persistent_buffers_set:
                continue
            if tensor not in received:
                data = processes.tensor_of_main(tensor.detach())
                is_weight = isinstance(tensor, nn.Parameter)
                received[tensor] = nn.Parameter(data, tensor.requires_grad) if is_weight else data
            setattr(owner, name, received[tensor])


class _LayerOutputs(NamedTuple):
    """What the hooks of ``fully_shard`` are shown of a layer that documents pass through."""

    output: Any
    keys: torch.Tensor
    values: torch.Tensor


def _put_out(layer_index: int, cache_argument: str) -> Callable[..., _LayerOutputs | None]:
    def hook(_: nn.Module, args: Any, kwargs: Any, output: Any) -> _LayerOutputs | None:  # noqa: ARG001
        cache = kwargs.get(cache_argument)
        if not torch.is_grad_enabled() or not isinstance(cache, CaptureCache):
            return None
        kept: Any = cache.layers[layer_index]
        # Hooks on a view would be lost to whatever changes it in place.
        kept.keys, kept.values = (
            kv.clone() if kv._is_view() else kv for kv in (kept.keys, kept.values)
        )
        return _LayerOutputs(output, kept.keys, kept.values)

    return hook


def _take_in(_: nn.Module, args: Any, output: Any) -> Any:  # noqa: ARG001
    return output.output if isinstance(output, _LayerOutputs) else None


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor gathered from all processes, or one that is whole as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_rows(tensor: torch.Tensor) -> tuple[torch.Tensor, slice]:
    """Return this process's part of a tensor, and which rows of the whole it is."""
    if not isinstance(tensor, DTensor):
        return tensor, slice(None)
    local = tensor.to_local()
    mesh = tensor.device_mesh
    # As `torch.chunk` cuts.
    start = mesh.get_local_rank() * -(-tensor.shape[0] // mesh.size())
    start = min(start, tensor.shape[0])
    return local, slice(start, start + local.shape[0])


def whole_state(hf: PreTrainedModel, is_main: bool) -> dict[str, torch.Tensor]:
    """Return a model's state, gathered in the main process's CPU memory, elsewhere empty."""
    found: dict[str, torch.Tensor] = {}
    held: dict[int, torch.Tensor] = {}
    for name, tensor in hf.state_dict(keep_vars=True).items():
        if id(tensor) not in held:  # tied weights are one tensor, and stay one
            gathered = whole(tensor.detach())
            held[id(tensor)] = gathered.cpu() if is_main else torch.empty(0)
        found[name] = held[id(tensor)]
    return found if is_main else {}
