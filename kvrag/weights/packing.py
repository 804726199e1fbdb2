"""Writes a GGUF file's matrices in their bits, in the order that kernels on the CPU read them.

The folder is one of Transformers' with a kind of quantisation of kvrag's own, which
`kvrag.models.small` reads. A matrix takes no more memory than a few thousand of its rows.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvrag.errors import ModelLoadError
from kvrag.weights.architectures import (
    ADD_ONE,
    IN_PAIRS,
    SEEING,
    SPARE,
    Metadata,
    read_config,
)
from kvrag.weights.cache import VERSION

_Bytes = npt.NDArray[Any]  # of uint8: numpy's operators forget it
_Floats = npt.NDArray[np.float32]


class Parts(NamedTuple):
    """A matrix: a weight is ``number * scale + least``; without `least`, less half of the range.

    Attributes
    ----------
    bits
        Of a number.
    numbers
        ``[N, K]``.
    scale, least
        ``[N, K / 32]``; a `scale` with 6 bits is ``[N, K / 16]``.
    """

    bits: int
    numbers: _Bytes
    scale: _Floats
    least: _Floats | None

    def values(self) -> _Floats:
        """Return the weights, rounded as the ``gguf`` package rounds them."""
        found = self.numbers.astype(np.float32).reshape(*self.scale.shape, -1)
        if self.least is None:
            found -= np.float32(1 << (self.bits - 1))
        found *= self.scale[..., None]
        if self.least is not None:
            found += self.least[..., None]
        return found.reshape(self.numbers.shape)


def take_apart(kind: str, rows: _Bytes) -> Parts:
    """Return the parts of rows of blocks ``[N, bytes]`` of a type in `KINDS`."""
    block_bytes, _, take = KINDS[kind]
    bits, numbers, scale, least = take(rows.reshape(-1, block_bytes))
    num_rows = len(rows)
    return Parts(
        bits,
        numbers.reshape(num_rows, -1),
        scale.reshape(num_rows, -1),
        None if least is None else least.reshape(num_rows, -1),
    )


_Taken = tuple[int, _Bytes, _Floats, _Floats | None]


def _halves(two: _Bytes) -> _Floats:
    return np.ascontiguousarray(two).view(np.float16).astype(np.float32)


def _nibbles(packed: _Bytes, width: int) -> _Bytes:
    """Return low, then high halves of each `width` bytes."""
    runs = packed.reshape(len(packed), -1, width)
    return np.stack([runs & 15, runs >> 4], 2).reshape(len(packed), -1)


def _fours(blocks: _Bytes, *, has_least: bool) -> _Taken:
    least = _halves(blocks[:, 2:4]) if has_least else None
    return 4, _nibbles(blocks[:, -16:], 16), _halves(blocks[:, :2]), least


def _fives(blocks: _Bytes, *, has_least: bool) -> _Taken:
    _, low, scale, least = _fours(blocks, has_least=has_least)
    high = np.unpackbits(np.ascontiguousarray(blocks[:, -20:-16]), axis=1, bitorder="little")
    return 5, low | high << 4, scale, least


def _eights(blocks: _Bytes) -> _Taken:
    return 8, blocks[:, 2:] ^ 128, _halves(blocks[:, :2]), None


def _k_scales(blocks: _Bytes) -> tuple[_Floats, _Floats]:
    """Return scales and least of eight groups: six bits each, in twelve bytes."""
    low, mid, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scale = np.concatenate([low & 63, high & 15 | low >> 2 & 48], 1).astype(np.float32)
    least = np.concatenate([mid & 63, high >> 4 | mid >> 2 & 48], 1).astype(np.float32)
    return _halves(blocks[:, :2]) * scale, _halves(blocks[:, 2:4]) * -least


def _k_fours(blocks: _Bytes) -> _Taken:
    return 4, _nibbles(blocks[:, 16:], 32), *_k_scales(blocks)


def _k_fives(blocks: _Bytes) -> _Taken:
    low, high = _nibbles(blocks[:, 48:], 32), blocks[:, None, 16:48]
    bits = high >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return 5, low | bits.reshape(low.shape) << 4, *_k_scales(blocks)


def _k_sixes(blocks: _Bytes) -> _Taken:
    low = _nibbles(blocks[:, :128], 64)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    scale = _halves(blocks[:, 208:]) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return 6, low | (high & 3).reshape(low.shape) << 4, scale, None


def greatest(kind: str, rows: _Bytes) -> float:
    """Return a number that no scale or least of rows ``[N, bytes]`` is above."""
    block_bytes, weights, _ = KINDS[kind]
    blocks = rows.reshape(-1, block_bytes)
    halves = [blocks[:, 208:]] if kind == "Q6_K" else [blocks[:, :2], blocks[:, 2:4]]
    if kind in ("Q4_0", "Q5_0", "Q8_0"):
        halves.pop()
    found = np.max([np.abs(_halves(two)).max() for two in halves])  # NaN, if any is
    return float(found) * (128 if weights > 32 else 1)


KINDS: dict[str, tuple[int, int, Callable[[Any], _Taken]]] = {
    "Q4_0": (18, 32, lambda blocks: _fours(blocks, has_least=False)),
    "Q4_1": (20, 32, lambda blocks: _fours(blocks, has_least=True)),
    "Q5_0": (22, 32, lambda blocks: _fives(blocks, has_least=False)),
    "Q5_1": (24, 32, lambda blocks: _fives(blocks, has_least=True)),
    "Q8_0": (34, 32, _eights),
    "Q4_K": (144, 256, _k_fours),
    "Q5_K": (176, 256, _k_fives),
    "Q6_K": (210, 256, _k_sixes),
}
"""Types of blocks by name: their bytes, their weights, and what takes them apart."""


METHOD = "kvrag"
"""What ``config.json`` calls weights that stay in their bits."""

# Types of models whose code reads nothing of linear layers' weights but products.
_PLAIN = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text")
_ROWS_AT_ONCE = 4096
_TYPES = {"U8": 1, "BF16": 2}
_ALIGNMENT = 64


@dataclass(frozen=True)
class _Kept:
    """A matrix that keeps its bits: a tensor of the file, and which row of it comes when."""

    kind: str
    data: Any
    order: Any

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of outputs and inputs."""
        block_bytes, weights, _ = KINDS[self.kind]
        return len(self.order), self.data.shape[1] // block_bytes * weights

    @cached_property
    def greatest(self) -> float:
        """What no scale or least is above; all of them are read."""
        return greatest(self.kind, self.data)


@dataclass(frozen=True)
class Plan:
    """A model without weights, and where each is from.

    Attributes
    ----------
    model
        On no device.
    kept
        Matrices in their bits, by the name of their layer.
    changed
        All other weights, in bfloat16, by name.
    """

    model: Any
    kept: Mapping[str, _Kept]
    changed: Mapping[str, Any]

    def save_pretrained(self, folder: Path) -> None:
        """Write weights and configurations into a folder, as a model does."""
        import torch
        import xxhash

        from kvrag.native.linear import GroupedWeight

        described: dict[str, dict[str, Any]] = {}
        entries: dict[str, tuple[str, list[int]]] = {
            name: ("BF16", list(tensor.shape)) for name, tensor in self.changed.items()
        }
        for name, one in self.kept.items():
            taken = take_apart(one.kind, one.data[:1])
            has_least = taken.least is not None
            described[name] = {
                "bits": taken.bits,
                "shape": one.shape,
                "has_least": has_least,
                "factor": GroupedWeight.factor_of(one.greatest),
            }
            sizes = GroupedWeight.sizes(taken.bits, one.shape, has_least)
            entries[f"{name}.weight"] = "U8", [sum(sizes)]
        places = _safetensors(folder / "model.safetensors", entries)
        for name, tensor in self.changed.items():
            places[name][:] = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        for name, one in self.kept.items():
            known = described[name]
            place = places[f"{name}.weight"]
            known["digest"] = _pack(one, place, known["factor"])
            known["checksum"] = xxhash.xxh3_128_hexdigest(place)
        for head, table in (getattr(self.model, "_tied_weights_keys", None) or {}).items():
            head, table = (name.removesuffix(".weight") for name in (head, table))
            if self.model.config.tie_word_embeddings and table in described:
                described[head] = described[table]
        config = self.model.config
        config.architectures = [type(self.model).__name__]
        if described:
            config.quantization_config = {
                "quant_method": METHOD,
                "version": VERSION,
                "weights": described,
            }
        config.save_pretrained(folder)
        self.model.generation_config.save_pretrained(folder)


def plan(known: Metadata, *, is_small: bool) -> Plan:
    """Return how a GGUF file's model is written.

    Parameters
    ----------
    known
        What the file says.
    is_small
        Whether matrices keep their bits where they can.

    Raises
    ------
    ModelLoadError
        When its tensors are not those of the model that it says it is.
    """
    import gguf
    import torch
    from transformers import AutoModelForCausalLM

    config = read_config(known)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        shapes = {name: shapes[name] for name in shapes.keys() - set(model._tied_weights_keys)}
    places = _places(known, config, shapes)
    kept: dict[str, _Kept] = {}
    changed: dict[str, Any] = {}
    for tensor in known.tensors.values():
        if tensor.name not in places:
            is_spare = tensor.name in SPARE or "attn_rot_embd" in tensor.name
            if is_spare or tensor.name.startswith(SEEING):
                continue
            raise known.refusal(
                f"has {tensor.name}, for which a model of type {config.model_type} has no place"
            )
        name, part = places[tensor.name]
        order = _row_order(known.architecture, config, tensor)
        is_kept = is_small and config.model_type in _PLAIN and tensor.tensor_type.name in KINDS
        if is_kept and name.endswith(".weight") and len(tensor.shape) == 2:
            one = kept[name.removesuffix(".weight")] = _Kept(
                tensor.tensor_type.name, tensor.data, order
            )
            _check_shape(known, tensor.name, one.shape, shapes[name])
            _check_finite(known, tensor.name, math.isfinite(one.greatest))
            continue
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        values = values[order] if known.architecture in IN_PAIRS else values
        made = torch.from_numpy(np.require(values, requirements="W"))
        if known.architecture in ADD_ONE and tensor.name.endswith("norm.weight"):
            made = made - 1
        place = changed.setdefault(name, torch.empty(shapes[name], dtype=torch.bfloat16))
        if config.model_type == "gpt_oss" and "_exps." in tensor.name:
            # It multiplies from the other side, and has the numbers of both parts in turn.
            place = place if place.ndim < 3 else place.mT
            place = place if part is None else place[:, part::2]
        elif part is not None:
            place = place.chunk(2, 1)[part]
        _check_shape(known, tensor.name, tuple(made.shape), tuple(place.shape))
        _check_finite(known, tensor.name, bool(made.isfinite().all()))
        place.copy_(made)
    if lacking := sorted(places[name][0] for name in places.keys() - known.tensors.keys()):
        raise known.refusal(
            f"lacks {len(lacking)} weights of a model of type {config.model_type}, first "
            f"{lacking[0]}"
        )
    return Plan(model, kept, changed)


def _places(
    known: Metadata, config: Any, names: Iterable[str]
) -> dict[str, tuple[str, int | None]]:
    """Return by a tensor's name the weight that it is, and which half of it, if one."""
    import gguf

    theirs = next(one for one, name in gguf.MODEL_ARCH_NAMES.items() if name == known.architecture)
    table = gguf.get_tensor_name_map(theirs, config.num_hidden_layers)
    found: dict[str, tuple[str, int | None]] = {}
    for name in names:
        end = next((one for one in (".weight", ".bias", "_bias") if name.endswith(one)), "")
        base, last = name.removesuffix(end), ".bias" if "bias" in end else ".weight"
        if base.endswith("experts.gate_up_proj"):
            begin = f"blk.{base.split('.')[2]}.ffn"
            found |= {
                f"{begin}_{half}_exps{last}": (name, number)
                for number, half in enumerate(("gate", "up"))
            }
            continue
        if (to := table.get_name(base)) is None:
            raise known.refusal(f"has no name for {name} of a model of type {config.model_type}")
        found[f"{to}{last}"] = name, None
    return found


def _check_shape(
    known: Metadata, name: str, found: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    if found != expected:
        raise known.refusal(
            f"has {name} of shape {found}, but says that its model has {expected} there"
        )


def _check_finite(known: Metadata, name: str, is_finite: bool) -> None:
    if not is_finite:
        raise ModelLoadError(
            f"{known.path} has {name} with NaN or infinity in it: it is damaged; fetch it again"
        )


def _row_order(architecture: str, config: Any, tensor: Any) -> Any:
    """Return which of a tensor's rows comes when."""
    rows = np.arange(len(tensor.data))
    is_query = ".attn_q." in tensor.name
    if architecture not in IN_PAIRS or not (is_query or ".attn_k." in tensor.name):
        return rows
    heads = config.num_attention_heads if is_query else config.num_key_value_heads
    return rows.reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def _pack(one: _Kept, place: Any, factor: float) -> str:
    """Write a matrix, and return the digest that it has in bfloat16."""
    import torch
    import xxhash

    from kvrag.native.linear import INT8_PANEL, GroupedWeight

    digest = xxhash.xxh3_128()
    num_panels = -(-len(one.order) // INT8_PANEL)
    for first in range(0, len(one.order), _ROWS_AT_ONCE):
        parts = take_apart(one.kind, one.data[one.order[first : first + _ROWS_AT_ONCE]])
        values = torch.from_numpy(parts.values()).bfloat16()
        digest.update(values.view(torch.uint8).numpy().data)
        numbers, scale = torch.from_numpy(parts.numbers), torch.from_numpy(parts.scale)
        least = None if parts.least is None else torch.from_numpy(parts.least)
        laid = GroupedWeight.pack(parts.bits, numbers, scale, least, factor)
        start = 0
        sizes = GroupedWeight.sizes(parts.bits, one.shape, least is not None)
        for size, part in zip(sizes, (laid.numbers, laid.scale, laid.least), strict=True):
            if part is not None:
                raw = part.reshape(-1).view(torch.uint8).numpy()
                at = start + size // num_panels * (first // INT8_PANEL)
                place[at : at + len(raw)] = raw
            start += size
    return digest.hexdigest()


def _safetensors(path: Path, entries: Mapping[str, tuple[str, list[int]]]) -> dict[str, Any]:
    """Make a file for tensors, and return where the bytes of each go. All fill whole words."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (kind, shape) in entries.items():
        size = _TYPES[kind] * int(np.prod(shape))
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        start = file.tell()
        if hasattr(os, "posix_fallocate"):  # a full disk would end the process while it writes
            os.posix_fallocate(file.fileno(), 0, start + end)
        file.truncate(start + end)
    data = np.memmap(path, np.uint8, "r+", start)
    return {
        name: data[slice(*entry["data_offsets"])]
        for name, entry in header.items()
        if name in entries
    }
