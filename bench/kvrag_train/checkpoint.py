"""Checkpoints that a run resumes from: weights, optimizer moments and progress, no pickle."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass
class Progress:
    """Progress of a run.

    Attributes
    ----------
    step
        Optimizer steps done, the copying phase included.
    copying_done
        Step at which copying was learned, -1 before.
    stage
        Stage of the curriculum.
    accuracy
        Running mean of the share of questions right in the present stage.
    optimizer_steps
        Steps that the optimizer's bias correction counts.
    """

    step: int = 0
    copying_done: int = -1
    stage: int = 0
    accuracy: float = 0.0
    optimizer_steps: int = 0


def save_checkpoint(
    path: Path, model: LlamaForCausalLM, optimizer: torch.optim.AdamW, progress: Progress
) -> None:
    """Write one safetensors file, atomically."""
    tensors = {}
    for name, parameter in model.named_parameters():
        tensors[f"weight/{name}"] = parameter.detach().contiguous()
        for moment in _MOMENTS:
            if moment in optimizer.state.get(parameter, {}):
                tensors[f"{moment}/{name}"] = optimizer.state[parameter][moment].contiguous()
    partial = path.with_suffix(".partial")
    save_file(tensors, str(partial), metadata={"progress": json.dumps(asdict(progress))})
    partial.replace(path)


def load_checkpoint(path: Path, model: LlamaForCausalLM, optimizer: torch.optim.AdamW) -> Progress:
    """Read a checkpoint into `model` and `optimizer`.

    Raises
    ------
    KeyError
        When the checkpoint lacks a parameter of the model.
    """
    with safe_open(str(path), framework="pt") as file:
        progress = Progress(**json.loads(file.metadata()["progress"]))
        names = set(file.keys())
        for name, parameter in model.named_parameters():
            if f"weight/{name}" not in names:
                raise KeyError(f"checkpoint {path} has no parameter {name}")
            with torch.no_grad():
                parameter.copy_(file.get_tensor(f"weight/{name}"))
            if f"exp_avg/{name}" in names:
                moments = {moment: file.get_tensor(f"{moment}/{name}") for moment in _MOMENTS}
                step = torch.tensor(float(progress.optimizer_steps))
                optimizer.state[parameter] = {"step": step, **moments}
    return progress


def load_weights(path: Path) -> dict[str, torch.Tensor]:
    """Read only the weights, by their names in the model."""
    with safe_open(str(path), framework="pt") as file:
        names = [name for name in file.keys() if name.startswith("weight/")]  # noqa: SIM118
        return {name.removeprefix("weight/"): file.get_tensor(name) for name in names}
