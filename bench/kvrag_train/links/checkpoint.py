"""A run's checkpoint, in one file: which run it is, its weights, the optimizer's moments."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from kvrag.errors import ParameterError
from kvrag.models.loading import all_finite
from kvrag.regularfile import require_regular
from kvrag_train.links.sharding import own_rows, whole

_MOMENTS = ("exp_avg", "exp_avg_sq")


def save_checkpoint(
    path: Path,
    run: Mapping[str, object],
    step: int,
    trained: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    *,
    is_main: bool = True,
) -> None:
    """Write a checkpoint of whole tensors, atomically.

    All processes of a run call this, so that each gives its parts of the tensors.

    Parameters
    ----------
    path
        The file.
    run
        What a run must share with this one in order to continue it: JSON values.
    step
        Number of steps taken.
    trained
        The trained tensors by name, which are the optimizer's parameters.
    optimizer
        The AdamW optimizer.
    is_main
        Whether this is the process that writes.

    Raises
    ------
    ParameterError
        When a weight is no longer finite: the training has diverged.
    """
    tensors = {}
    for name, weight in trained.items():
        gathered = whole(weight.detach())
        if not gathered.isfinite().all():
            raise ParameterError(
                f"training: after {step} steps {name} is no longer finite: the training has "
                "diverged; start a new run with a lower learning rate"
            )
        found = {"weight": gathered}
        for moment in _MOMENTS:
            if moment in optimizer.state.get(weight, {}):
                found[moment] = whole(optimizer.state[weight][moment])
        if is_main:
            for kind, tensor in found.items():
                # One process's device may have no room for the whole tensor.
                tensors[f"{kind}/{name}"] = tensor.cpu().contiguous()
    if not is_main:
        return
    metadata = {"step": str(step), "run": json.dumps(run)}
    partial = path.with_suffix(".partial")
    save_file(_without_shared(tensors), str(partial), metadata=metadata)
    partial.replace(path)


def load_checkpoint(
    path: Path,
    run: Mapping[str, object],
    trained: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
) -> int:
    """Restore weights and moments, and return the steps taken; parameters as `save_checkpoint`'s.

    Raises
    ------
    ParameterError
        When the checkpoint is of another run, or damaged.
    """
    try:
        require_regular(path)
        with safe_open(str(path), framework="pt") as file:
            return _restore(file, path, run, trained, optimizer)
    except ParameterError:
        raise
    except (SafetensorError, OSError, KeyError, ValueError, RecursionError) as error:
        raise ParameterError(
            f"{path}: no checkpoint that can be read ({type(error).__name__}: {error}); delete it "
            "to start a new run"
        ) from error


def _restore(
    file: Any,
    path: Path,
    run: Mapping[str, object],
    trained: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
) -> int:
    metadata = file.metadata() or {}
    found = json.loads(metadata["run"])
    known = found if isinstance(found, dict) else {}
    for name in dict.fromkeys([*run, *known]):  # what one of them lacks counts too
        if known.get(name) != run.get(name):
            raise ParameterError(
                f"{path} is of another run: {name} {known.get(name)!r}, asked for "
                f"{run.get(name)!r}; name another --out, or delete the folder"
            )
    step = int(metadata["step"])
    names = set(file.keys())
    for name, weight in trained.items():
        _copy(file, path, f"weight/{name}", weight)
        if f"{_MOMENTS[0]}/{name}" in names:
            moments = {moment: torch.empty_like(weight) for moment in _MOMENTS}
            for moment, tensor in moments.items():
                _copy(file, path, f"{moment}/{name}", tensor)
            optimizer.state[weight] = {"step": torch.tensor(float(step)), **moments}
    return step


def _copy(file: Any, path: Path, name: str, target: torch.Tensor) -> None:
    with torch.no_grad():
        part, rows = own_rows(target)
        stored = file.get_slice(name)
        shape = stored.get_shape()
        tensor = None
        if shape == list(target.shape):
            tensor = file.get_tensor(name) if part is target else stored[rows]
        if tensor is None or not all_finite(tensor):
            raise ParameterError(
                f"{path}: {name} of shape {shape}, expected finite numbers of shape "
                f"{list(target.shape)}; delete it to start a new run"
            )
        part.copy_(tensor)


def _without_shared(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return copies of tensors that share another's memory: safetensors writes no shared memory."""
    seen: set[int] = set()
    found = {}
    for name, tensor in tensors.items():
        address = tensor.untyped_storage().data_ptr()
        found[name] = tensor.clone() if address in seen else tensor
        seen.add(address)
    return found
