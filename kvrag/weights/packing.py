"""Writes a GGUF file's matrices in their bits, in the order that kernels on the CPU read them.

The folder is one of Transformers' with a kind of quantisation of kvrag's own, which
`kvrag.models.small` reads. A matrix takes no more memory than a few thousand of its rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvrag.weights.blocks import KINDS, greatest, take_apart
from kvrag.weights.cache import VERSION

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

        from kvrag.native import GroupedWeight

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
                "factor": GroupedWeight.factor_of(greatest(one.kind, one.data)),
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
        config.quantization_config = {
            "quant_method": METHOD,
            "version": VERSION,
            "weights": described,
        }
        config.save_pretrained(folder)
        self.model.generation_config.save_pretrained(folder)


def plan(path: Path, reader: Any) -> Plan | None:
    """Return how a GGUF file's model is written; None if none of its matrices can keep its bits.

    Parameters
    ----------
    path
        The file.
    reader
        A ``gguf.GGUFReader`` of it.
    """
    import gguf
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, modeling_gguf_pytorch_utils

    theirs: Any = modeling_gguf_pytorch_utils  # untyped
    config = AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name)
    if config.model_type not in _PLAIN:
        return None
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    parsed = theirs.load_gguf_checkpoint(str(path))
    (architecture,) = theirs.read_field(reader, "general.architecture")
    processor = theirs.TENSOR_PROCESSORS.get(architecture, theirs.TensorProcessor)(parsed["config"])
    names = theirs.get_gguf_hf_weights_map(model, processor)
    needed = set(model.state_dict())
    if config.tie_word_embeddings:
        needed -= set(model._tied_weights_keys)
    kept: dict[str, _Kept] = {}
    changed: dict[str, Any] = {}
    for tensor in reader.tensors:
        name = names.get(tensor.name)
        if name not in needed:
            continue
        layer, _, last = name.rpartition(".")
        is_matrix = last == "weight" and len(tensor.shape) == 2
        kind = tensor.tensor_type.name
        order = _row_order(processor, tensor) if is_matrix and kind in KINDS else None
        if order is not None:
            kept[layer] = _Kept(kind, tensor.data, order)
            continue
        made = processor.process(gguf.dequantize(tensor.data, tensor.tensor_type), tensor.name)
        changed[name] = torch.from_numpy(np.array(made.weights)).to(torch.bfloat16)
    found = changed.keys() | {f"{layer}.weight" for layer in kept}
    return Plan(model, kept, changed) if kept and found == needed else None


def _row_order(processor: Any, tensor: Any) -> Any | None:
    """Return which of a matrix's rows comes when; None if Transformers changes more than that."""
    rows = np.arange(len(tensor.data), dtype=np.float64)
    try:
        made = processor.process(rows[:, None], tensor.name)
    except (ValueError, KeyError, TypeError):  # it looks at columns too
        return None
    if made.name != tensor.name or made.weights.shape != (len(rows), 1):
        return None
    order = made.weights[:, 0]
    return order.astype(np.int64) if np.array_equal(np.sort(order), rows) else None


def _pack(one: _Kept, place: Any, factor: float) -> str:
    """Write a matrix, and return the digest that it has in bfloat16."""
    import torch
    import xxhash

    from kvrag.native import INT8_PANEL, GroupedWeight

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
        file.truncate(start + end)
    data = np.memmap(path, np.uint8, "r+", start)
    return {
        name: data[slice(*entry["data_offsets"])]
        for name, entry in header.items()
        if name in entries
    }
