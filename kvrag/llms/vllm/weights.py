"""The model that fuses in a worker: it shares vLLM's weights, or loads a second copy.

A Transformers model is made without memory, and its parameters become views of vLLM's: of equal
parameters, or of rows in the matrices that vLLM has merged (q, k and v; gate and up). So kvrag's
fuser works unchanged, without new code for each family. A hash verifies the views: engines repack
weights for their kernels, and some drop the originals (the CPU build does).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from kvrag.arguments import shown
from kvrag.errors import KVRagError, UnsupportedModelError
from kvrag.ingest.config import IndexConfig
from kvrag.kvcache import DTYPES, FusedKV
from kvrag.llms.vllm.options import check_engine
from kvrag.llms.vllm.settings import CONNECTOR, ConnectorSettings, require_tested
from kvrag.models.families import CORE
from kvrag.models.kv_model import ALONE, KVModel, Ranks
from kvrag.models.linears import pack_linears
from kvrag.models.pretrained import from_pretrained, load_weights
from kvrag.models.shards import load_shard

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from vllm.config import KVTransferConfig, VllmConfig

# A rank may wait for another one's reads. One that waits longer gives up, and the engine computes.
_PATIENCE = timedelta(seconds=300)


class GroupRanks(Ranks):
    """Workers that are connected through a separate process group.

    vLLM's own groups serve the thread that runs the engine's steps. Prompts are fused in another
    thread, whose exchanges must not come between those.

    Parameters
    ----------
    members
        Global numbers of the workers, this one's among them; each of them makes this call.
    device
        The device of what is summed.
    """

    def __init__(self, members: Sequence[int], device: torch.device) -> None:
        backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"
        self._group: ProcessGroup = distributed.new_group(
            list(members), timeout=_PATIENCE, backend=backend, use_local_synchronization=True
        )
        self.size = len(members)
        self.rank = list(members).index(distributed.get_rank())

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """Return the sum of all workers' tensors, in the memory of `part`."""
        whole = part.contiguous()
        distributed.all_reduce(whole, group=self._group)
        return whole

    def most(self, numbers: Sequence[int]) -> list[int]:
        """Return the greatest number that a worker has in each place."""
        told = torch.tensor(numbers, dtype=torch.int64)
        distributed.all_reduce(told, distributed.ReduceOp.MAX, group=self._group)
        return [int(number) for number in told]


@dataclass(frozen=True)
class Part:
    """What one worker of an engine has.

    Attributes
    ----------
    heads
        The workers that share the heads of this one's layers.
    workers
        All workers of the engine.
    """

    heads: Ranks = field(default=ALONE)
    workers: Ranks = field(default=ALONE)

    def head_range(self, num_kv_heads: int) -> slice:
        """Return this worker's key heads, of all that the model has."""
        each = num_kv_heads // self.heads.size
        return slice(self.heads.rank * each, (self.heads.rank + 1) * each)


def connected_part(device: torch.device) -> Part:
    """Return this worker's part, and connect it with the other workers, which all call this."""
    from vllm.distributed import parallel_state

    heads, workers = parallel_state.get_tp_group(), parallel_state.get_world_group()
    if workers.world_size == 1:
        return Part()
    return Part(
        ALONE if heads.world_size == 1 else GroupRanks(heads.ranks, device),
        GroupRanks(workers.ranks, device),
    )


# Noted before vLLM binds threads to single cores: it imports this module before, with its worker.
PROCESS_CORES: frozenset[int] = (
    frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()
)
"""Numbers of the cores that this process may use; empty if the system does not report them."""

logger = logging.getLogger("kvrag")

# Rows of a prompt that memory is taken for at the start. Longer ones take what is left then.
_MOST_ROWS = 16384


@dataclass(frozen=True)
class Fusing:
    """What a worker fuses with.

    Attributes
    ----------
    model
        The model.
    part
        What the worker has of the engine's model.
    memory
        Room for the KV of a prompt; None on the CPU, where unused memory costs nothing.
    """

    model: KVModel
    part: Part
    memory: FusedKV | None


_prepared: dict[str, Fusing] = {}


class NotShareableError(Exception):
    """The engine's weights cannot replace Transformers'; the message says which and why."""


def prepare(vllm_config: VllmConfig, model: nn.Module) -> None:
    """Make ready for the same engine's call of `fusing`, with the engine's own model.

    The engine calls it once its weights are loaded, and sizes its cache afterwards by what memory
    is left: a second copy of the weights and a prompt's buffer must be there by then.
    """
    extra = _extra_config(vllm_config.kv_transfer_config)
    if extra is None:
        return
    try:
        settings = ConnectorSettings.from_extra_config(extra)
        require_tested(any_version=settings.any_version)
        index_config = check_engine(vllm_config, None, settings)
    except KVRagError:
        return  # the connector refuses it for the same reason, where the user can read it
    made = _fusing(vllm_config, index_config, model)
    if made.model.device.type != "cpu":
        num_rows = min(vllm_config.model_config.max_model_len, _MOST_ROWS) + 1
        memory = FusedKV(made.model.spec, num_rows, num_rows, made.model.device)
        made = replace(made, memory=memory)
    _prepared[vllm_config.instance_id] = made


def _extra_config(transfer: KVTransferConfig | None) -> dict[str, Any] | None:
    """Return the settings of kvrag's connector, also of one among several; None without it."""
    if transfer is None:
        return None
    extra: dict[str, Any] = transfer.kv_connector_extra_config
    known = [(transfer.kv_connector, extra)]
    for one in extra.get("connectors", ()):
        known.append((one.get("kv_connector"), one.get("kv_connector_extra_config", {})))
    return next((settings for name, settings in known if name == CONNECTOR), None)


def fusing(vllm_config: VllmConfig, index_config: IndexConfig) -> Fusing:
    """Return what fuses for an engine: what `prepare` has made, or else made now."""
    made = _prepared.pop(vllm_config.instance_id, None)
    return made or _fusing(vllm_config, index_config, None)


def _fusing(vllm_config: VllmConfig, index_config: IndexConfig, model: nn.Module | None) -> Fusing:
    part = connected_part(torch.device(vllm_config.device_config.device))
    return Fusing(_fusing_model(vllm_config, index_config, part.heads, model), part, None)


def _fusing_model(
    vllm_config: VllmConfig, index_config: IndexConfig, heads: Ranks, model: nn.Module | None
) -> KVModel:
    """Return the model that fuses for an engine.

    It shares the engine's weights if the engine's model is given and the weights' hash is that of
    the index. Otherwise it is loaded a second time, and a log message says so. Workers that share
    heads each load theirs: of parts, no hash could be compared.

    Parameters
    ----------
    vllm_config, index_config
        The configurations of engine and index.
    heads
        The workers that share the model's heads.
    model
        The engine's model.

    Raises
    ------
    ModelLoadError, UnsupportedModelError
        If it cannot be loaded, or split.
    """
    path: str = vllm_config.model_config.model
    device = torch.device(vllm_config.device_config.device)
    model_type = from_pretrained(AutoConfig, path).model_type
    if model_type not in CORE:
        raise UnsupportedModelError(
            f"no test compares models of type {shown(model_type)} in vLLM with full prefill; take "
            f"one of {', '.join(CORE)}, or let kvrag answer without vLLM"
        )
    if heads.size > 1:
        return load_shard(path, DTYPES[index_config.dtype], device, heads)
    try:
        if model is None:
            raise NotShareableError(
                "the engine does not run kvrag's worker (worker_cls="
                "'kvrag.llms.vllm.engine_worker.KVRagWorker')"
            )
        shared = share_weights(model, path, DTYPES[index_config.dtype], device)
        if shared.fingerprint != index_config.model_fingerprint:
            raise NotShareableError("their hash differs from that of the index's model")
    except NotShareableError as error:
        # A separate model, not one shared in this process, because its weights get packed.
        hf = load_weights(path, DTYPES[index_config.dtype], str(device))
        kv_model = KVModel(hf, path, name=path)
        num_bytes = sum(one.numel() * one.element_size() for one in hf.parameters())
        _ = kv_model.fingerprint  # cached now, of the weights before packing
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
        vLLM's model.
    path
        Folder or hub name of the model's configuration and tokenizer.
    dtype, device
        Dtype and device of the engine's weights.

    Raises
    ------
    NotShareableError
        If a parameter has no counterpart with its shape and dtype.
    UnsupportedModelError
        If kvrag does not support the model's family.
    """
    with torch.device("meta"):
        hf: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            from_pretrained(AutoConfig, path), dtype=dtype, trust_remote_code=False
        )
    theirs = dict(model.named_parameters())
    packed: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    shapes = {name: one.shape for name, one in hf.named_parameters(remove_duplicate=False)}
    # Tied parameters stay one parameter here too; engines know it by its first name.
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
    return KVModel(hf, path, name=path)


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
    # Engines pad vocabularies: rows after ours are unused.
    if found.dim() != len(shape) or first_row + shape[0] > found.shape[0]:
        raise NotShareableError(
            f"it has repacked {name}: expected {list(shape)}, found {list(found.shape)}"
        )
    view = found.detach()[first_row : first_row + shape[0]]
    if view.shape != shape:
        raise NotShareableError(f"{name} is {list(view.shape)} there, expected {list(shape)}")
    return view


def _make_buffers(hf: PreTrainedModel, device: torch.device) -> None:
    """Make the buffers that no checkpoint holds: the frequencies of rotary positions."""
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
