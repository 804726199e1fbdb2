"""The process that converts a GGUF file to a folder: weights, tokenizer, chat template.

Runs as a separate process, ``python -m kvrag.weights.convert FILE FOLDER [small]``. Dequantising
takes memory that only the end of a process returns, and `_read_once` changes the libraries.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from pathlib import Path
from typing import Any

from kvrag.arguments import shown
from kvrag.errors import ModelLoadError
from kvrag.plugins import reason
from kvrag.weights import packing


def convert(path: Path, folder: Path, *, is_small: bool = False) -> None:
    """Write the model of a GGUF file into a folder, as safetensors.

    Parameters
    ----------
    path
        The file, in one piece.
    folder
        Exists and is empty.
    is_small
        Whether matrices keep their bits where they can; all other weights become bfloat16.

    Raises
    ------
    ModelLoadError
        When the file cannot be read, holds an architecture that Transformers does not read from
        GGUF, or a type of quantisation that ``gguf`` does not dequantise.
    """
    import gguf

    try:
        reader = gguf.GGUFReader(str(path))
    except BaseException as error:  # it raises whatever the bytes lead to
        raise ModelLoadError(f"{path} cannot be read as GGUF: {reason(error)}") from error
    _check_types(path, reader)

    # Seconds to import, so only for a file that can be read.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    _read_once(path, reader)
    inside = {"gguf_file": path.name, "trust_remote_code": False}
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path.parent), **inside)
        planned = packing.plan(path, reader) if is_small else None
        if planned is None:
            model = AutoModelForCausalLM.from_pretrained(
                str(path.parent),
                **inside,
                dtype=torch.bfloat16,
                quantization_config=GgufConfig(dequantize=True),
            )
        else:
            model = planned.model
    except BaseException as error:  # a foreign file takes the libraries anywhere
        raise ModelLoadError(
            f"Transformers cannot read {path} (architecture "
            f"{shown(_field(reader, 'architecture'))}): "
            f"{reason(error)}. Take the model's folder of safetensors instead"
        ) from error
    end_of_turn = _ends(reader)
    ends = model.generation_config.eos_token_id
    known = ends if isinstance(ends, list) else [ends]
    model.generation_config.eos_token_id = sorted({*known, *end_of_turn} - {None}) or None
    tokenizer.save_pretrained(folder)
    (model if planned is None else planned).save_pretrained(folder)


def _check_types(path: Path, reader: Any) -> None:
    import gguf

    plain = {gguf.GGMLQuantizationType[name] for name in ("F16", "F32", "F64")}
    known = plain | set(gguf.quants._type_traits)
    for tensor in reader.tensors:
        if tensor.tensor_type not in known:
            raise ModelLoadError(
                f"{path}: tensor {tensor.name} is quantised as {tensor.tensor_type.name}, which "
                "the gguf package does not dequantise; take a file in another type, such as "
                "Q4_K_M or Q8_0"
            )


def _read_once(path: Path, reader: Any) -> None:
    """Make the library use one reader of the file, and look names up once.

    Transformers parses the file again for the config, the tokenizer and the weights, and makes the
    table of all tensors' names for each module; most of a conversion's time is spent there.
    """
    import gguf

    made = gguf.GGUFReader

    def open_once(other: Any, *rest: Any, **options: Any) -> Any:
        return reader if Path(other) == path else made(other, *rest, **options)

    # Transformers looks both up in the package each time.
    replaced: Any = gguf
    replaced.GGUFReader = open_once
    replaced.get_tensor_name_map = functools.cache(gguf.get_tensor_name_map)


def _field(reader: Any, name: str) -> Any:
    field = reader.fields.get(f"general.{name}")
    return None if field is None else field.contents()


def _ends(reader: Any) -> set[int]:
    """Return tokens that end a turn: chat models declare them beside the end of a text."""
    found = set()
    for name in ("eos", "eot", "eom"):
        field = reader.fields.get(f"tokenizer.ggml.{name}_token_id")
        if field is not None:
            found.add(int(field.contents()))
    return found


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        try:
            convert(Path(sys.argv[1]), Path(sys.argv[2]), is_small=sys.argv[3:] == ["small"])
        except ModelLoadError as error:
            sys.exit(str(error))
