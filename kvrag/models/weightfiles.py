"""Whether a configuration fits the weights beside it, before a model of its sizes is made.

A configuration is a small file that anybody may have written: a million layers, or matrices of a
terabyte, would end the process before a missing weight is noticed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from kvrag.errors import ModelLoadError
from kvrag.models.decoders import INDEX_FILE, ONE_FILE, weight_files

# What a configuration counts or measures its modules by; positions need no weights.
_SIZE = re.compile(r"(num|n)_.*|.*(_size|_dim|_heads|_layers|_experts|_rank)|d_.*|dim|.*_inner")
# Parameters and buffers beside a checkpoint's elements: masks, frequencies, tied weights.
_SPARE_FACTOR, _SPARE_ELEMENTS = 4, 1 << 26
# Weights that one integer of a quantised checkpoint holds, with 2 bits each.
_MOST_IN_ONE = {"U8": 4, "I32": 16}
_FLOATS = ("F64", "F32", "F16", "BF16")
TEXT_KEYS = {
    r"^language_model\.lm_head\.": "lm_head.",
    r"^(model\.)?language_model\.(model\.)?(?!lm_head)": "model.",
}
"""Where checkpoints of models that also see keep the text part."""
_UNNAMED = (
    "but config.json names no quantisation, so their scales would be left out; take the checkpoint "
    "with its own config.json, or the model in 16 bits"
)


def check_sizes(reference: str, config: PreTrainedConfig, *, is_decoder: bool = True) -> None:
    """Raise ModelLoadError if a configuration needs more weights than the files beside it have.

    Parameters
    ----------
    reference
        The model's folder, or its hub name; its weights are downloaded if they are not in the
        hub's cache.
    config
        Its configuration.
    is_decoder
        Whether it is a causal language model; of others, only the single sizes are compared.
    """
    folder = Path(reference)
    files = _in_folder(folder) if folder.is_dir() else _of_hub(reference)
    named = {name: entry for path in files for name, entry in _entries(path)}
    shapes = [shape for _, shape in named.values()]
    if not shapes:
        raise ModelLoadError(
            f"{reference}: no *.safetensors with weights; expected {ONE_FILE}, or the files that "
            f"{INDEX_FILE} names (pickled weights are not read)"
        )
    most = max(len(shapes), *(max(shape, default=1) for shape in shapes))
    limits = {"num_hidden_layers": len(shapes)}
    sizes = [*_sizes(config.to_dict()), ("num_hidden_layers", config.num_hidden_layers)]
    if wrong := next((one for one in sizes if one[1] > limits.get(one[0], most)), None):
        raise ModelLoadError(
            f"{reference}/config.json: {wrong[0]} is {wrong[1]:,}, but the files beside it hold "
            f"{len(shapes):,} weights with at most {most:,} rows or columns; restore config.json"
        )
    for name in ("num_hidden_layers", "max_position_embeddings"):
        if (size := getattr(config, name, None)) is not None and size < 1:
            raise ModelLoadError(
                f"{reference}/config.json: {name} is {size}, expected at least 1; restore it"
            )
    if not is_decoder:
        return
    is_quantised = getattr(config, "quantization_config", None) is not None
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)  # type: ignore[no-untyped-call]
    needed = sum(one.numel() for one in (*model.parameters(), *model.buffers()))
    packed = _MOST_IN_ONE if is_quantised else {}
    found = sum(math.prod(shape) * packed.get(kind, 1) for kind, shape in named.values())
    if needed > _SPARE_FACTOR * found + _SPARE_ELEMENTS:
        raise ModelLoadError(
            f"{reference}/config.json describes a model of {needed:,} numbers, but the files "
            f"beside it hold {found:,}; restore config.json, or take the weights that belong to it"
        )

    if is_quantised:
        return
    weights = model.state_dict()
    for name, (kind, shape) in named.items():
        own = name
        for pattern, short in TEXT_KEYS.items():
            own = re.sub(pattern, short, own)
        weight = weights.get(own)
        is_float = name.endswith("weight") if weight is None else weight.is_floating_point()
        if is_float and kind not in _FLOATS:
            raise ModelLoadError(f"{reference}: {name} has numbers of type {kind}, {_UNNAMED}")
        if weight is not None and shape != list(weight.shape):
            raise ModelLoadError(
                f"{reference}: {name} has the shape {shape}, but config.json describes "
                f"{list(weight.shape)}; restore config.json, or take the weights that belong to it"
            )


def _in_folder(folder: Path) -> list[Path]:
    try:
        return list(weight_files(folder))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ModelLoadError(
            f"{folder / INDEX_FILE} names no files of weights (weight_map); restore it"
        ) from error


def _of_hub(name: str) -> list[Path]:
    try:
        return [Path(str(cached_file(name, ONE_FILE)))]
    except OSError:
        index = str(cached_file(name, INDEX_FILE))
        return [Path(one) for one in get_checkpoint_shard_files(name, index)[0]]  # type: ignore[no-untyped-call]


def _entries(path: Path) -> Iterator[tuple[str, tuple[str, list[int]]]]:
    """Yield the type and shape of each tensor that a file's header has, by its name."""
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # it is no mapping
                part = file.get_slice(name)
                yield name, (part.get_dtype(), part.get_shape())
    except FileNotFoundError as error:
        raise ModelLoadError(f"{path} is missing, but {INDEX_FILE} names it; restore it") from error
    except (OSError, SafetensorError) as error:
        raise ModelLoadError(
            f"{path} is no safetensors file, or is cut short or longer than its header says "
            f"({error}); restore it"
        ) from error


def _sizes(fields: dict[str, Any]) -> Iterator[tuple[str, int]]:
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from _sizes(value)
        elif isinstance(value, int) and _SIZE.fullmatch(name):
            yield name, value
