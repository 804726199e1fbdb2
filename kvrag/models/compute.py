"""The precision in which a model's linear layers compute: given, or the fastest by measurement."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from torch import nn

from kvrag.arguments import AUTO, COMPUTES, INT4, QUANTISED, check_compute, shown
from kvrag.errors import ParameterError
from kvrag.models.decoders import Model
from kvrag.models.linears import fast_modules
from kvrag.models.quantised import is_quantised
from kvrag.models.small import small_layers
from kvrag.native.kernels import IS_COMPILED

# A precision that rounds more is chosen only if it takes at most this share of the time. So noise
# does not decide, and the choice is the same at each start.
_GAIN = 0.85
# Weights and rows that are measured: more than caches hold, in a few milliseconds.
_MOST_WEIGHTS = 1 << 22
_NUM_ROWS = 64
_REPEATS = 5


def resolved_compute(hf: Model, compute: str | None) -> str:
    """Return the precision that a loaded model's linear layers compute in.

    Parameters
    ----------
    compute
        One of `COMPUTES`; None means the type of the weights.

    Returns
    -------
    str
        A name of `COMPUTES` other than ``"auto"``, or ``"float16"`` for such weights.

    Raises
    ------
    ParameterError
        For another name, or if the model cannot compute in another type than its weights have.
    """
    check_compute(compute)
    own = str(hf.dtype).removeprefix("torch.")
    if compute is None or compute == own:
        return own
    reason = None
    if hf.device.type != "cpu":
        reason = f"only models on the CPU can; this one is on {hf.device}"
    elif small_layers(hf):
        reason = "they stay in a GGUF file's bits; name the file, not the folder of its conversion"
    elif is_quantised(hf):
        reason = "its weights are quantised already, and their own modules compute"
    elif not _linears(hf):
        reason = f"{shown(hf.config.model_type)} has no linear layers that kvrag knows"
    elif compute in QUANTISED and not IS_COMPILED:
        reason = (
            "4 and 8 bits need kvrag's compiled kernels, and none run here (see 'kvrag doctor')"
        )
    if reason is None:
        return fastest(own, measured(hf)) if compute == AUTO else compute
    if compute == AUTO:
        return own
    raise ParameterError(
        f"compute {shown(compute)}: this model computes in its weights' type, {own}: {reason}"
    )


def fastest(own: str, seconds: Mapping[str, float]) -> str:
    """Return the fastest precision, or a more exact one that takes about as long.

    Parameters
    ----------
    own
        The weights' own type: nothing is more exact.
    seconds
        What the same work takes in each precision. Later ones round more.
    """
    chosen = own
    for name, taken in seconds.items():
        if name != own and taken <= _GAIN * seconds[chosen]:
            chosen = name
    return chosen


def measured(hf: Model) -> dict[str, float]:
    """Return the seconds that one of a model's linear layers takes, in each precision.

    That is the largest one inside the decoder, or as much of it as a few milliseconds allow. The
    runs take turns, and the shortest of each counts.
    """
    own = str(hf.dtype).removeprefix("torch.")
    part = _part_of_largest(hf)
    # A model of this layer: what `fast_modules` keeps for it ends with it.
    model = nn.Sequential(part)
    rows = torch.linspace(-1, 1, _NUM_ROWS * part.in_features, dtype=hf.dtype)
    rows = rows.view(_NUM_ROWS, part.in_features)
    # 4 bits lose too much to be chosen for somebody.
    left_out = (AUTO, own, INT4) if IS_COMPILED else (AUTO, own, *QUANTISED)
    names = [own, *(name for name in COMPUTES if name not in left_out)]
    seconds = dict.fromkeys(names, float("inf"))
    with torch.no_grad():
        for turn in range(_REPEATS + 1):
            for name in names:
                with fast_modules(model, name):
                    started = time.perf_counter()
                    model(rows)
                    taken = time.perf_counter() - started
                if turn:  # the first one packs the weights
                    seconds[name] = min(seconds[name], taken)
    return seconds


def _linears(hf: Model) -> list[nn.Linear]:
    base: nn.Module = hf.base_model
    return [one for one in base.modules() if type(one) is nn.Linear]


def _part_of_largest(hf: Model) -> nn.Linear:
    """Return a layer that shares weights with the largest linear layer inside the decoder."""
    weight = max((one.weight for one in _linears(hf)), key=torch.Tensor.numel).detach()
    num_inputs = weight.shape[1]
    weight = weight[: max(1, _MOST_WEIGHTS // num_inputs)]
    part = nn.Linear(num_inputs, len(weight), bias=False, device="meta")
    part.weight = nn.Parameter(weight, requires_grad=False)
    return part
