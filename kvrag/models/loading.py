"""From a path, a hub name or a loaded object to a model, its tokenizer and their fingerprints."""

from __future__ import annotations

import hashlib
import json
import logging
import platform
from pathlib import Path
from typing import Any

import torch
import xxhash
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from kvrag.errors import ModelLoadError, ParameterError, UnsupportedModelError
from kvrag.weights.cache import convert
from kvrag.weights.sources import find_gguf

EMBEDDED_MODEL = "kvrag-tiny"

_log = logging.getLogger(__name__)

_EXPECTED_MODEL = (
    "expected a name that `kvrag models` lists, a folder with config.json, tokenizer.json and "
    "*.safetensors, a GGUF file, ollama:NAME, llama.cpp:NAME, or a hub name such as 'org/name'"
)

# Fields of a config that change neither weights nor KV; some are filled in by loading alone.
_VOLATILE_CONFIG = {
    "_name_or_path",
    "architectures",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "return_dict",
    "output_attentions",
    "output_hidden_states",
    "id2label",
    "label2id",
    "problem_type",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "sep_token_id",
}


def resolve_model(reference: str | Path) -> str:
    """Return a local folder as an absolute path, or a hub name as it is.

    A GGUF file, by any of the references that `kvrag.weights.sources.find_gguf` knows, is
    converted once, which takes a minute and says so through `logging`.

    Raises
    ------
    ModelLoadError
        When `reference` looks like a path and nothing is there, or cannot be converted.
    """
    if not isinstance(reference, str | Path):
        raise ParameterError(f"model {reference!r}: {_EXPECTED_MODEL}")
    text = str(reference)
    if text == EMBEDDED_MODEL:
        return str(Path(__file__).parent / "tiny")
    if (gguf := find_gguf(reference)) is not None:
        return str(convert(gguf, _log.info).folder)
    path = Path(text).expanduser()
    if path.is_dir():
        return str(path.resolve())
    looks_like_hub_name = (
        isinstance(reference, str) and text.count("/") <= 1 and text[:1] not in ("/", ".", "~", "")
    )
    if path.exists() or not looks_like_hub_name:
        raise ModelLoadError(f"no model at {text!r}: {_EXPECTED_MODEL}")
    return text


def _from_pretrained(loader: Any, reference: str, **options: Any) -> Any:
    """Load from a folder or the hub's local cache; go to the network only for a hub name."""
    try:
        try:
            return loader.from_pretrained(reference, local_files_only=True, **options)
        except OSError:
            if Path(reference).is_dir():
                raise
            return loader.from_pretrained(reference, **options)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ModelLoadError(
            f"could not load {reference!r}: {error}. Expected a folder or hub repository with "
            "config.json, tokenizer.json and *.safetensors (pickled weights are not read)"
        ) from error


def load_tokenizer(reference: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model without its weights.

    Raises
    ------
    ModelLoadError
        When there is none.
    UnsupportedModelError
        When it is not a fast tokenizer: chunk boundaries need character offsets.
    """
    tokenizer: PreTrainedTokenizerBase = _from_pretrained(AutoTokenizer, resolve_model(reference))
    return check_tokenizer(tokenizer)


def check_tokenizer(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return `tokenizer` if it can report character offsets, else raise UnsupportedModelError."""
    if not tokenizer.is_fast:
        raise UnsupportedModelError(
            f"{type(tokenizer).__name__} is a slow tokenizer and reports no character offsets; "
            "convert it to a fast one (a tokenizer.json file)"
        )
    return tokenizer


def all_finite(tensor: torch.Tensor) -> bool:
    """Return whether all numbers of a tensor, as read from a file, are finite."""
    # In float32, for types of 8 bits that cannot say it themselves.
    return bool(tensor.float().isfinite().all())


def usable_device(name: str) -> torch.device:
    """Return the device of that name. Raises ParameterError when it cannot be used here."""
    try:
        # Allocating tells an unknown name, a missing driver and a number too high alike; reading
        # tells a place that holds no numbers ("meta").
        found = torch.zeros(1, device=name)
        found.cpu()
        return found.device
    except (RuntimeError, AssertionError, TypeError) as error:
        # Torch's own words for these are about its inside.
        computes_nothing = isinstance(error, NotImplementedError)
        reason = (
            "torch computes nothing on it here"
            if computes_nothing
            else str(error).partition("\n")[0]
        )
        raise ParameterError(
            f"device {name!r} cannot be used: {reason}; leave it out for the CPU"
        ) from error


def load_weights(
    reference: str | Path, dtype: torch.dtype | None, device: str | None
) -> PreTrainedModel:
    """Load a decoder in evaluation mode.

    Parameters
    ----------
    dtype
        None takes the checkpoint's own, or float32 where that has 16 bits and the processor does
        not multiply it natively; the embedded model runs in float32.
    device
        Where to put it; None means the CPU.

    Raises
    ------
    ModelLoadError
        When there is no such model, or it cannot be read.
    ParameterError
        When the device cannot be used here.
    """
    place = None if device is None else usable_device(device)
    if dtype is None and str(reference) == EMBEDDED_MODEL:
        dtype = torch.float32
    model: PreTrainedModel = _from_pretrained(
        AutoModelForCausalLM,
        resolve_model(reference),
        dtype="auto" if dtype is None else dtype,
        use_safetensors=True,
    )
    if dtype is None and place is None and model.dtype == torch.bfloat16 and not has_bfloat16():
        model.float()  # type: ignore[no-untyped-call]
    if place is not None:
        model.to(place)  # type: ignore[arg-type]  # transformers' wrapper is untyped
    model.eval()  # type: ignore[no-untyped-call]
    return model


def has_bfloat16() -> bool:
    """Return whether this processor multiplies bfloat16; others convert each number first."""
    if platform.machine().lower() in ("arm64", "aarch64"):
        return True
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def model_fingerprint(model: PreTrainedModel) -> str:
    """Return 32 hexadecimal digits over all weights and the config.

    A model that differs in one weight, its element type or a setting has another fingerprint.
    """
    digest = hashlib.blake2b(digest_size=16, person=b"kvrag-model")
    config = {
        name: value
        for name, value in model.config.to_dict().items()
        if value is not None and name not in _VOLATILE_CONFIG and not name.startswith("_")
    }
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    hashed: dict[int, bytes] = {}
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        address = tensor.data_ptr()
        if address not in hashed:  # tied weights are read once
            raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            hashed[address] = xxhash.xxh3_128_digest(raw.numpy().data)
        digest.update(hashed[address])
    return digest.hexdigest()


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return 32 hexadecimal digits over everything that decides a text's token ids."""
    definition = json.loads(tokenizer.backend_tokenizer.to_str())
    # Both are set by whoever called the tokenizer last, not by the tokenizer.
    definition.pop("padding", None)
    definition.pop("truncation", None)
    return hashlib.blake2b(
        json.dumps(definition, sort_keys=True).encode(), digest_size=16, person=b"kvrag-token"
    ).hexdigest()


def shared_prefix_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the token ids every chunk is encoded behind, so that the attention sink is present.

    BOS where the tokenizer or the chat template puts one first; else the head that all
    conversations of the chat template share; else nothing.
    """
    bos = tokenizer.bos_token_id
    if bos is not None and list(tokenizer("")["input_ids"])[:1] == [bos]:
        return (bos,)
    if not getattr(tokenizer, "chat_template", None):
        return ()
    try:
        first, second = (
            tokenizer.apply_chat_template(
                [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
            )
            for content in ("A", "7 b")
        )
    except Exception:  # a template may raise anything, and refuse a lone user turn
        return ()
    first_ids, second_ids = (
        tokenizer(text, add_special_tokens=False)["input_ids"] for text in (first, second)
    )
    if bos is not None and first_ids[:1] == [bos]:
        return (bos,)
    common = 0
    while common < min(len(first_ids), len(second_ids)) and first_ids[common] == second_ids[common]:
        common += 1
    return tuple(first_ids[:common])
