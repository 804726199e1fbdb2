"""A run's processes: each takes its share of every step, and all reach the same weights.

`accelerate launch` or `torchrun` starts them; a command that neither has started is alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from kvrag.errors import KVRagError, ParameterError
from kvrag_train.parallel import average_gradients

T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """One process and how it stands among those of a run, which call methods in the same order.

    Attributes
    ----------
    index, count
        This process's number, and the number of processes.
    device
        This process's device; None if it is alone, and the options name one.
    is_sharded
        Whether each holds a part of the model's weights only (FSDP).
    frees_layers
        Whether sharding processes free a layer's weights between forward and backward.
    """

    index: int = 0
    count: int = 1
    device: torch.device | None = None
    is_sharded: bool = False
    frees_layers: bool = True

    @property
    def is_main(self) -> bool:
        """Whether this process writes what all have made."""
        return self.index == 0

    def share(self, items: Sequence[T]) -> tuple[Sequence[T], bool]:
        """Return this process's share of `items`, at least one, and whether it counts.

        Where there are fewer items than processes some get one that is another's: what is computed
        together stays the same for all, and what comes of it is to be left out.
        """
        own = items[self.index :: self.count]
        return (own, True) if own else (items[:1], False)

    def total(self, values: Iterable[float]) -> list[float]:
        """Return sums over all processes."""
        sums = list(values)
        if self.count == 1:
            return sums
        tensor = torch.tensor(sums, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        return [float(value) for value in tensor]

    def average_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Average the gradients of parameters that all processes hold whole, in place."""
        if self.count > 1:
            average_gradients(parameters)

    def of_main(self, text: str) -> str:
        """Return the main process's text."""
        if self.count == 1:
            return text
        data = torch.tensor(list(text.encode()), dtype=torch.uint8)
        size = int(self.tensor_of_main(torch.tensor(len(data))))
        return bytes(self.tensor_of_main(data.resize_(size)).tolist()).decode()

    def tensor_of_main(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of the main process's tensor on this process's device, where there are
        several; of others the shape and type are looked at.
        """
        if self.count == 1:
            return tensor
        if self.is_main:
            data = tensor.to(self.device, copy=True)
        else:
            data = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
        dist.broadcast(data, 0)
        return data

    def check_same(self, run: Mapping[str, object]) -> None:
        """Raise ParameterError, in all processes, when one has another run in mind than another."""
        own = {name: json.dumps(value, default=str) for name, value in run.items()}
        main = json.loads(self.of_main(json.dumps(own)))
        differing = sorted(
            name for name in own.keys() | main.keys() if own.get(name) != main.get(name)
        )
        if self.total([len(differing)])[0]:
            what = ", ".join(f"{n} {own.get(n)}, there {main.get(n)}" for n in differing)
            raise ParameterError(
                "training: the processes of this run do not agree "
                f"({what or 'another one says in what'}): start all with one command line, over "
                "the same model, data and --out, which all of them see"
            )

    def wait(self) -> None:
        """Wait until all processes are here."""
        self.total([0.0])


ALONE = Processes()


@contextmanager
def launched(device: str | None) -> Iterator[Processes]:
    """Join the processes that a launcher has started with this one, until all is done.

    Parameters
    ----------
    device
        As the user has named it.

    Raises
    ------
    ParameterError
        For a launch that cannot be served, saying how to launch.
    """
    processes = _joined(device)
    try:
        yield processes
    except RuntimeError as error:
        # NCCL raises its own type of error, gloo a plain RuntimeError.
        if isinstance(error, dist.DistError) or "gloo" in str(error):
            raise KVRagError(
                f"training: process {processes.index} of {processes.count} has lost another one "
                "(its message says why); start again to continue from the last checkpoint: "
                f"{error}"
            ) from error
        raise
    # Only finished processes wait for each other: a failed one must end and waits for none.
    if processes.count > 1:
        processes.wait()
        dist.destroy_process_group()


def _joined(device: str | None) -> Processes:
    _check_launch()
    count = int(os.environ.get("WORLD_SIZE", "1"))
    is_sharded = _is_on("ACCELERATE_USE_FSDP")
    if count == 1:
        if is_sharded:
            raise ParameterError(
                "training: FSDP shares a model among processes, found one: launch several with "
                "--num_processes"
            )
        return ALONE
    if device not in (None, "cpu"):
        raise ParameterError(
            f"training: --device {device} with {count} processes: each gets its own from the "
            "launcher; leave --device out"
        )
    try:
        from accelerate import PartialState
    except ModuleNotFoundError as error:
        raise ParameterError(
            f"training: {count} processes need {error.name}: pip install 'kvrag[train]'"
        ) from error
    on_cpu = device == "cpu" or _is_on("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if not on_cpu and here > torch.accelerator.device_count():
        raise ParameterError(
            f"training: {here} processes on this machine, which has "
            f"{torch.accelerator.device_count()} GPUs: launch at most one for each, or all with "
            "--device cpu"
        )
    state = PartialState(cpu=on_cpu)
    return Processes(
        index=state.process_index,
        count=state.num_processes,
        device=state.device,
        is_sharded=is_sharded,
        frees_layers=_is_on("FSDP_RESHARD_AFTER_FORWARD", "true"),
    )


def _check_launch() -> None:
    """Refuse what a launcher may ask for and what nothing here would do."""
    setting = os.environ.get
    precision = setting("ACCELERATE_MIXED_PRECISION", "no")
    refused = [
        (_is_on("ACCELERATE_USE_DEEPSPEED"), "DeepSpeed", "use --use_fsdp --fsdp_version 2"),
        (_is_on("ACCELERATE_USE_MEGATRON_LM"), "Megatron-LM", "use --use_fsdp --fsdp_version 2"),
        (
            precision not in ("no", "bf16"),
            f"--mixed_precision {precision}",
            "leave it out; --precision bfloat16 of this command computes in 16 bits",
        ),
        (
            setting("ACCELERATE_DYNAMO_BACKEND", "NO").upper() != "NO",
            "--dynamo_backend",
            "leave it out",
        ),
    ]
    if _is_on("ACCELERATE_USE_FSDP"):
        refused += [
            (setting("FSDP_VERSION", "1") != "2", "FSDP 1", "add --fsdp_version 2"),
            (_is_on("FSDP_OFFLOAD_PARAMS"), "--fsdp_offload_params", "leave it out"),
            (
                _is_on("FSDP_ACTIVATION_CHECKPOINTING"),
                "--fsdp_activation_checkpointing",
                "leave it out; --gradient-checkpointing of this command does that",
            ),
        ]
    for is_found, what, remedy in refused:
        if is_found:
            raise ParameterError(f"training: launched with {what}, not served here: {remedy}")


def _is_on(name: str, default: str = "false") -> bool:
    return os.environ.get(name, default).lower() in ("1", "true", "yes")
