"""What a user names: a model becomes a folder or a hub name, a device becomes one that works."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from kvrag import arguments
from kvrag.errors import ModelLoadError, ParameterError
from kvrag.weights.cache import EXPECTED_MODEL, convert
from kvrag.weights.named import EMBEDDED_MODEL
from kvrag.weights.sources import find_gguf

EMBEDDED_FOLDER = str(Path(__file__).parent / "tiny")


_log = logging.getLogger(__name__)


def resolve_model(reference: str | Path, *, is_small: bool | None = False) -> str:
    """Return a local folder as an absolute path, or a hub name unchanged.

    A GGUF file, by any of the references that `kvrag.weights.sources.find_gguf` knows, is
    converted once, which takes a minute and says so through `logging`.

    Parameters
    ----------
    reference
        What a user calls it.
    is_small
        Whether a GGUF file's weights stay in their bits; None takes what there is.

    Raises
    ------
    ModelLoadError
        When `reference` looks like a path but does not exist, or cannot be converted.
    ParameterError
        When it is no name, and no folder can have that path.
    """
    if not isinstance(reference, str | Path):
        raise ParameterError(f"model {arguments.shown(reference)}: {EXPECTED_MODEL}")
    text = str(reference)
    if text == EMBEDDED_MODEL:
        return EMBEDDED_FOLDER
    if (gguf := find_gguf(reference)) is not None:
        return str(convert(gguf, _log.info, is_small=is_small).folder)
    path = arguments.path(text, "model")
    if path.is_dir():
        return str(path.resolve())
    looks_like_hub_name = (
        isinstance(reference, str) and text.count("/") <= 1 and text[:1] not in ("/", ".", "~", "")
    )
    if path.exists() or not looks_like_hub_name:
        raise ModelLoadError(f"no model at {arguments.shown(text)}: {EXPECTED_MODEL}")
    return text


def usable_device(name: str) -> torch.device:
    """Return the device with that name. Raises ParameterError if it cannot be used here."""
    if name.partition(":")[0] == "mps":
        raise ParameterError(
            "device 'mps' cannot be used: kvrag has not been tried on Apple's graphics "
            "processors; leave it out for the CPU"
        )
    try:
        # Allocating detects an unknown name, a missing driver and a number too high alike; reading
        # detects a device that holds no numbers ("meta").
        found = torch.zeros(1, device=name)
        found.cpu()
        return found.device
    except (RuntimeError, AssertionError, TypeError) as error:
        # Torch's own message is about its internals.
        computes_nothing = isinstance(error, NotImplementedError)
        reason = (
            "torch computes nothing on it here"
            if computes_nothing
            else arguments.cut(str(error).partition("\n")[0])
        )
        raise ParameterError(
            f"device {arguments.shown(name)} cannot be used: {reason}; leave it out for the CPU"
        ) from error
