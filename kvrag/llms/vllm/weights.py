"""The model that fuses in a worker: vLLM's own weights where they serve, else a second copy.

A Transformers skeleton is made without memory, and its parameters become views of vLLM's: equal
ones as they are, and rows of the matrices that vLLM has fused (q, k and v; gate and up). So the
one fuser of kvrag serves, and no family is written again. Whether the views are right is not
believed but hashed: engines repack weights for their kernels, and some drop the originals (the
CPU build does).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from kvrag.ingest.config import IndexConfig
from kvrag.kvcache import DTYPES
from kvrag.models.kv_model import KVModel
from kvrag.models.loading import load_tokenizer, load_weights
from kvrag.models.packed import pack_linears

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("kvrag")

_lent: dict[str, nn.Module] = {}


class NotShareableError(Exception):
    """The engine's weights cannot stand for Transformers'; the message says which and why."""


def lend_model(vllm_config: VllmConfig, model: nn.Module) -> None:
    """Keep an engine's model for `fusing_model` of the same engine."""
    _lent[vllm_config.instance_id] = model


def fusing_model(vllm_config: VllmConfig, index_config: IndexConfig) -> KVModel:
    """Return the model that fuses for an engine.

    It is made of the engine's weights if `lend_model` was called for it and they are, hashed, those
    of the index; else it is loaded a second time, and the user is told.

    Raises
    ------
    ModelLoadError, UnsupportedModelError
        When it cannot be loaded.
    """
    path: str = vllm_config.model_config.model
    device = torch.device(vllm_config.device_config.device)
    model = _lent.pop(vllm_config.instance_id, None)
    try:
        if model is None:
            raise NotShareableError(
                "the engine does not run kvrag's worker (worker_cls="
                "'kvrag.llms.vllm.engine_worker.KVRagWorker')"
            )
        shared = share_weights(model, path, DTYPES[index_config.dtype], device)
        if shared.fingerprint != index_config.model_fingerprint:
            raise NotShareableError("they hash otherwise than those that the index was made with")
    except NotShareableError as error:
        # Its own, not one that others of this process hold: it is made for fusing alone.
        hf = load_weights(path, DTYPES[index_config.dtype], str(device))
        kv_model = KVModel(hf, load_tokenizer(path), name=path)
        num_bytes = sum(one.numel() * one.element_size() for one in hf.parameters())
        _ = kv_model.fingerprint  # is kept: of the weights as they were
        pack_linears(hf)
        logger.warning(
            "kvrag fuses with a second copy of the model (%.2f GB): vLLM's own weights cannot be "
            "used, %s",
            num_bytes / 1e9,
            error,
        )
        return kv_model
    logger.info("kvrag fuses with vLLM's own weights")
    return shared


def share_weights(model: nn.Module, path: str, dtype: torch.dtype, device: torch.device) -> KVModel:
    """Return a `KVModel` whose parameters are views of an engine's.

    Parameters
    ----------
    model
        vLLM's.
    path
        Folder or hub name of the model's configuration and tokenizer.
    dtype, device
        Of the engine's weights.

    Raises
    ------
    NotShareableError
        When a parameter has no counterpart of its shape and type.
    UnsupportedModelError
        When the family cannot be served at all.
    """
    with torch.device("meta"):
        hf: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            AutoConfig.from_pretrained(path), dtype=dtype
        )
    theirs = dict(model.named_parameters())
    packed: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    shapes = {name: one.shape for name, one in hf.named_parameters(remove_duplicate=False)}
    # Tied ones are one parameter here too; its first name is the one that engines know.
    made: dict[int, nn.Parameter] = {}
    for name, parameter in list(hf.named_parameters(remove_duplicate=False)):
        if id(parameter) not in made:
            view = _view(name, theirs, shapes, packed)
            if view.dtype != dtype:
                raise NotShareableError(f"{name} is {view.dtype} in the engine, expected {dtype}")
            made[id(parameter)] = nn.Parameter(view, requires_grad=False)
        owner, _, last = name.rpartition(".")
        hf.get_submodule(owner)._parameters[last] = made[id(parameter)]
    _make_buffers(hf, device)
    hf.eval()  # type: ignore[no-untyped-call]
    return KVModel(hf, load_tokenizer(path), name=path)


def _view(
    name: str,
    theirs: Mapping[str, torch.Tensor],
    shapes: Mapping[str, torch.Size],
    packed: Mapping[str, list[str]],
) -> torch.Tensor:
    """Return the rows of an engine's parameter that are Transformers' parameter `name`."""
    owner, _, kind = name.rpartition(".")
    parent, _, module = owner.rpartition(".")
    found, first_row = theirs.get(name), 0
    if found is None:
        for packed_name, parts in packed.items():
            if module in parts and f"{parent}.{packed_name}.{kind}" in theirs:
                found = theirs[f"{parent}.{packed_name}.{kind}"]
                before = parts[: parts.index(module)]
                first_row = sum(shapes[f"{parent}.{part}.{kind}"][0] for part in before)
    shape = shapes[name]
    if found is None:
        raise NotShareableError(f"it has no {name}")
    # Vocabularies are padded there: the rows behind ours are nobody's.
    if found.dim() != len(shape) or first_row + shape[0] > found.shape[0]:
        raise NotShareableError(
            f"it has repacked {name}: expected {list(shape)}, found {list(found.shape)}"
        )
    view = found.detach()[first_row : first_row + shape[0]]
    if view.shape != shape:
        raise NotShareableError(f"{name} is {list(view.shape)} there, expected {list(shape)}")
    return view


def _make_buffers(hf: PreTrainedModel, device: torch.device) -> None:
    """Give the skeleton the buffers that no checkpoint holds: the frequencies of its positions."""
    for name, module in list(hf.named_modules()):
        if not any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            continue
        maker: Any = type(module)
        try:
            with torch.device(device):
                made = maker(config=getattr(module, "config", hf.config))
        except TypeError as error:
            raise NotShareableError(f"{name} cannot be made alone ({error})") from error
        parent, _, last = name.rpartition(".")
        setattr(hf.get_submodule(parent), last, made)
    left = [name for name, buffer in hf.named_buffers() if buffer.is_meta]
    if left:
        raise NotShareableError(f"its buffer {left[0]} is in no checkpoint")
