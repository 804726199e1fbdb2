"""A rank's part of a model: some heads of each layer, and some rows of each MLP.

Transformers' own plan of tensor parallelism (``base_model_tp_plan``) says which linear layers are
split by outputs and which by inputs. The part is an ordinary model with fewer heads. Only the
layers split by inputs add up what all ranks computed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from kvrag.errors import UnsupportedModelError
from kvrag.models.families import CORE, find_family, num_kv_heads
from kvrag.models.kv_model import KVModel, Ranks
from kvrag.models.linears import pack_linears
from kvrag.models.loading import model_fingerprint
from kvrag.models.pretrained import load_weights

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_OUTPUTS, _INPUTS = "colwise", "rowwise"


def load_shard(path: str, dtype: torch.dtype, device: torch.device, ranks: Ranks) -> KVModel:
    """Load a rank's part of a model.

    The whole model is read once, on the CPU, for its fingerprint. Afterwards only the part is in
    memory. On the CPU it is packed for oneDNN.

    Raises
    ------
    UnsupportedModelError
        If the model cannot be split into that many parts.
    ModelLoadError
        If it cannot be read.
    """
    hf = load_weights(path, dtype, None)
    check_shards(hf.config, ranks.size)
    fingerprint = model_fingerprint(hf)
    sums = keep_part(hf, ranks)
    hf.to(device)  # type: ignore[arg-type]  # transformers' wrapper is untyped
    pack_linears(hf)
    for name in sums:
        hf.get_submodule(name).register_forward_hook(lambda _, __, output: ranks.sum(output))
    model = KVModel(hf, path, name=path)
    model.ranks = ranks
    model.__dict__["fingerprint"] = fingerprint
    return model


def check_shards(config: PreTrainedConfig, size: int) -> None:
    """Raise UnsupportedModelError unless each of `size` ranks gets whole key heads of a model."""
    num_heads = num_kv_heads(config)
    if num_heads % size:
        raise UnsupportedModelError(
            f"tensor_parallel_size={size}: the model has {num_heads} key heads, which {size} "
            "processes cannot share equally; choose a divisor of that number"
        )
    if size > 1 and config.model_type not in CORE:
        raise UnsupportedModelError(
            f"tensor_parallel_size={size}: no test compares models of type {config.model_type} in "
            "parts with whole ones; set it to 1"
        )
    if size > 1 and getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModelError(
            f"tensor_parallel_size={size}: kvrag does not split quantised weights; set it to 1"
        )
    styles = set(_plan(config).values())
    if size > 1 and not {_OUTPUTS, _INPUTS} <= styles:
        raise UnsupportedModelError(
            f"tensor_parallel_size={size}: models of type {config.model_type} store their "
            "projections in a way that kvrag does not split; set it to 1"
        )


def keep_part(hf: PreTrainedModel, ranks: Ranks) -> list[str]:
    """Drop what other ranks have of a model's layers, in place.

    Returns
    -------
    list of str
        Names of the modules whose outputs have to be summed over the ranks.
    """
    config, plan = hf.config, _plan(hf.config)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    layers = getattr(hf.base_model, find_family(hf).layers)
    prefix = f"{hf.base_model_prefix}.{find_family(hf).layers}."
    summed = []
    for name, linear in list(layers.named_modules(prefix=prefix.rstrip("."))):
        if not isinstance(linear, nn.Linear):
            continue
        style = plan.get(_pattern(name.removeprefix(f"{hf.base_model_prefix}.")))
        if style == _OUTPUTS:
            linear.weight = _part(linear.weight, 0, ranks)
            if linear.bias is not None:
                linear.bias = _part(linear.bias, 0, ranks)
            linear.out_features = linear.weight.shape[0]
        elif style == _INPUTS:
            linear.weight = _part(linear.weight, 1, ranks)
            if linear.bias is not None and ranks.rank:
                linear.register_parameter("bias", None)  # it counts once
            linear.in_features = linear.weight.shape[1]
            summed.append(name)
        else:
            raise UnsupportedModelError(
                f"tensor_parallel_size={ranks.size}: {name} of {config.model_type} models is in "
                "no plan that kvrag knows; set it to 1"
            )
    config.head_dim = head_dim
    config.num_key_value_heads = num_kv_heads(config) // ranks.size
    config.num_attention_heads //= ranks.size
    return summed


def _plan(config: PreTrainedConfig) -> Mapping[str, str]:
    plan: Mapping[str, str] | None = config.base_model_tp_plan
    return {
        name: style
        for name, style in (plan or {}).items()
        if style in (_OUTPUTS, _INPUTS) and not name.endswith("query_key_value")
    }


def _pattern(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", name)


def _part(parameter: torch.Tensor, dim: int, ranks: Ranks) -> nn.Parameter:
    """Return a copy of one rank's rows or columns."""
    if parameter.shape[dim] % ranks.size:
        raise UnsupportedModelError(
            f"tensor_parallel_size={ranks.size}: a layer has {parameter.shape[dim]} channels, "
            "which the processes cannot share equally; choose a divisor of that number"
        )
    part = parameter.detach().chunk(ranks.size, dim)[ranks.rank]
    return nn.Parameter(part.clone(memory_format=torch.contiguous_format), requires_grad=False)
