"""Checkpoints with quantised weights: what reads them, what computes them, where it can.

Transformers and the package of a format do the work. Their modules stay as they are: kernels and
graphs of layers step aside, since none of them is a plain linear layer over plain weights.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from kvrag.arguments import cut, shown
from kvrag.errors import ModelLoadError
from kvrag.weights.packing import METHOD

if TYPE_CHECKING:
    from kvrag.models.decoders import Model

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Format:
    """How a kind of quantised checkpoint is read.

    Attributes
    ----------
    packages
        What has to be installed beside Transformers, by pip's names.
    widens
        Whether the CPU has no kernel for it, so that weights are loaded in 16 bits there.
    """

    packages: tuple[str, ...] = ()
    widens: bool = False


FORMATS = {
    "compressed-tensors": Format(("compressed-tensors",)),
    "bitsandbytes": Format(("bitsandbytes",)),
    "gptq": Format(("gptqmodel", "optimum")),
    "awq": Format(("gptqmodel",)),
    "torchao": Format(("torchao",)),
    "fp8": Format(widens=True),
    "mxfp4": Format(widens=True),
}
"""The formats that CPUs compute, by ``quant_method`` in ``config.json``; a test has each."""


def check_quantised(reference: str, given: Any, device: torch.device) -> Any:
    """Return how to load quantised weights, as Transformers takes it.

    Parameters
    ----------
    reference
        The model's folder or name.
    given
        What its ``config.json`` says of its quantisation.
    device
        Where it is going to compute.

    Raises
    ------
    ModelLoadError
        If they cannot be read or computed here: it says what to install or to take instead.
    """
    method = str(given.get("quant_method")) if isinstance(given, dict) else None
    if isinstance(given, dict) and (given.get("load_in_4bit") or given.get("load_in_8bit")):
        method = "bitsandbytes"  # as Transformers has it
    known, on_cpu = FORMATS.get(str(method)), device.type == "cpu"
    packages = ("accelerate", *known.packages) if known else ()
    missing = [name for name in packages if find_spec(name.replace("-", "_")) is None]
    why = None
    if missing:
        why = f"pip install {' '.join(missing)}"
    elif known is None and on_cpu and method != METHOD:
        why = "no kernel for CPUs that kvrag knows computes them"
    elif known is not None and known.widens and on_cpu:
        given = {**given, "dequantize": True}
        _log.info("the CPU has no kernel for %s: its weights are loaded in 16 bits", method)
    try:
        if why is None:
            from transformers.quantizers.auto import AutoHfQuantizer

            AutoHfQuantizer.from_config(given, pre_quantized=True).validate_environment()
    except ModelLoadError:
        raise
    except Exception as error:  # whatever a wrong description makes of it
        why = cut(str(error))
        if isinstance(error, ModuleNotFoundError):
            why = f"pip install {error.name}"
        raise _refused(reference, method, why) from error
    if why is not None:
        raise _refused(reference, method, why)
    return given


def _refused(reference: str, method: str | None, why: str) -> ModelLoadError:
    return ModelLoadError(
        f"the weights of {shown(reference)} are quantised ({shown(str(method))}), and cannot be "
        f"computed here: {why}. Or take the model in 16 bits, or as GGUF"
    )


def is_quantised(model: Model) -> bool:
    """Return whether a model's own modules compute with quantised weights."""
    return getattr(model, "hf_quantizer", None) is not None and bool(
        getattr(model, "is_quantized", False)
    )


def unpack(model: Model) -> None:
    """Let a model's layers compute one by one, where a format waits for the whole to be called."""
    quantizer: Any = model.hf_quantizer
    if hasattr(model, "ct_decompress_hook"):
        _log.info("compressed-tensors computes in 16 bits: the weights are unpacked")
        quantizer.compressor.decompress_model(model)


def is_plain(layer: nn.Module) -> bool:
    """Return whether a linear layer's weights are numbers, not a kind of tensor of some package."""
    return type(layer._parameters.get("weight")) is nn.Parameter


def parts_of(weight: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the plain tensors that weights are kept in."""
    if not hasattr(weight, "__tensor_flatten__"):
        yield weight
        return
    names, _ = weight.__tensor_flatten__()
    for name in names:
        yield from parts_of(getattr(weight, name))
