"""Loading: a path, hub name or loaded object becomes a model, its tokenizer and fingerprints."""

from __future__ import annotations

import hashlib
import json
import math
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
import xxhash

from kvrag.errors import ModelLoadError
from kvrag.models import templates
from kvrag.models.decoders import Model, load_decoder
from kvrag.models.quantised import parts_of
from kvrag.models.references import EMBEDDED_FOLDER, resolve_model
from kvrag.models.remembered import Remembered, remembered
from kvrag.models.small import small_layers
from kvrag.models.tokens import Tokenizer, check_tokenizer, encode, num_equal
from kvrag.native.kernels import IS_COMPILED, instruction_set

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# These multiply float32 alone.
_WITHOUT_BFLOAT16 = ("scalar", "avx2", "avx512", "avx512vbmi2")
# Config fields that change neither weights nor KV; loading alone fills in some of them.
_VOLATILE_CONFIG = {
    *("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version"),
    *("use_cache", "return_dict", "output_attentions", "output_hidden_states"),
    *("id2label", "label2id", "problem_type"),
    *("pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id"),
}


def load_tokenizer(reference: str | Path) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer without its weights.

    Raises
    ------
    ModelLoadError
        When there is no tokenizer.
    UnsupportedModelError
        When the tokenizer is not a fast one: chunk boundaries need character offsets.
    """
    path = resolve_model(reference, is_small=None)
    known = remembered(path, _describe)
    own = None if known is None else _own_tokenizer(known, path)
    if own is not None:
        # It has all members of Transformers' own.
        tokenizer = cast("PreTrainedTokenizerBase", own)
    else:
        tokenizer = check_tokenizer(_whole_tokenizer(path))
    encode(tokenizer, ["Ab 1\n"], add_special_tokens=True)  # it may panic
    return tokenizer


def _describe(folder: str) -> Remembered | None:
    from kvrag.models.describe import describe

    return describe(folder)


def _whole_tokenizer(path: str) -> Any:
    from transformers import AutoTokenizer

    from kvrag.models.pretrained import from_pretrained

    return from_pretrained(AutoTokenizer, path)


def _own_tokenizer(known: Remembered, folder: str) -> Tokenizer | None:
    """Return kvrag's own tokenizer of a model; None if it takes Transformers'."""
    from tokenizers import Tokenizer as Backend

    if known.tokenizer is None:
        return None
    if known.definition is not None:
        backend = Backend.from_str(known.definition)
    else:
        backend = Backend.from_file(str(Path(folder) / "tokenizer.json"))
    backend.no_padding()
    backend.no_truncation()
    return Tokenizer(backend, known.tokenizer, folder, lambda: _whole_tokenizer(folder))


def is_transformers(model: object) -> TypeGuard[PreTrainedModel]:
    """Return whether a model is an object of Transformers, which is not imported for that."""
    library: Any = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(model, library.PreTrainedModel)


def load_model(path: str, dtype: torch.dtype | None, device: str | None) -> Model:
    """Load a decoder as `kvrag.models.pretrained.load_weights` does; kvrag's own if it knows it."""
    is_own = IS_COMPILED and device in (None, "cpu")  # it computes by the compiled kernels alone
    known = remembered(path, _describe) if is_own else None
    if known is not None:
        embedded = torch.float32 if path == EMBEDDED_FOLDER else None
        own = load_decoder(path, known, dtype or embedded)
        if own is not None:
            return own
    from kvrag.models.pretrained import load_weights

    return load_weights(path, dtype, device)


def all_finite(tensor: torch.Tensor) -> bool:
    """Return whether all numbers of a tensor are finite."""
    # Extremes of 8-bit types are not known; those of a tensor with NaN are NaN.
    wide = tensor.float() if tensor.itemsize == 1 else tensor
    return not wide.numel() or all(math.isfinite(one) for one in wide.aminmax())


def has_bfloat16() -> bool:
    """Return whether this processor multiplies bfloat16; others convert each number first."""
    if instruction_set() in _WITHOUT_BFLOAT16:  # perhaps by choice (``KVRAG_ISA``)
        return False
    if platform.machine().lower() in ("arm64", "aarch64"):
        return True
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def model_fingerprint(model: Model) -> str:
    """Return a digest of all weights and the config, 32 hexadecimal digits.

    Models that differ in one weight, the element type or a setting have different fingerprints.
    Raise ModelLoadError if weights hold NaN or infinity, or stay in their bits and are damaged.
    """
    digest = hashlib.blake2b(digest_size=16, person=b"kvrag-model")
    config = {
        name: value
        for name, value in model.config.to_dict().items()
        if value is not None and name not in _VOLATILE_CONFIG and not name.startswith("_")
    }
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    hashed: dict[int, bytes] = {}
    small = {f"{name}.weight": layer for name, layer in small_layers(model).items()}
    for name, tensor in sorted(model.state_dict().items()):
        if name in small:  # known since the file was converted
            layer, address = small[name], tensor.data_ptr()
            if address not in hashed:
                layer.check()
                hashed[address] = bytes.fromhex(layer.digest)
            digest.update(f"{name} {torch.bfloat16} {layer.shape}".encode())
            digest.update(hashed[address])
            continue
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        for part in parts_of(tensor):
            address = part.data_ptr()
            if address not in hashed:  # tied weights are read once
                numbers = part.detach().cpu().contiguous().reshape(-1)
                # Those of 8 bits take long; what they lead to is looked at in answers.
                if part.is_floating_point() and part.itemsize > 1 and not all_finite(numbers):
                    raise ModelLoadError(
                        f"{model.name_or_path}: {name} holds NaN or infinity, expected finite "
                        "weights: it is damaged, or was converted to a type that does not reach "
                        "its numbers; fetch the model again, or convert it to bfloat16"
                    )
                raw = numbers.view(torch.uint8)
                hashed[address] = xxhash.xxh3_128_digest(raw.numpy().data)
            digest.update(hashed[address])
    return digest.hexdigest()


def shared_prefix_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the token ids that every chunk is encoded after: a prompt's head, before documents.

    With a chat template, that is the beginning that all its conversations share: BOS, a default
    system turn, the beginning of the user's turn. Without one, or if conversations share nothing,
    it is BOS if the tokenizer puts it first, otherwise nothing.
    """
    bos = tokenizer.bos_token_id
    is_first = bos is not None and encode(tokenizer, [""], True)[0].token_ids[:1] == (bos,)
    return _template_head(tokenizer) or ((bos,) if is_first else ())


def _template_head(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the token ids that the chat template puts before the first user's text."""
    if not getattr(tokenizer, "chat_template", None):
        return ()
    try:
        first, second = (
            templates.render(
                tokenizer, [{"role": "user", "content": content}], add_generation_prompt=True
            )
            for content in ("A", "7 b")
        )
    except templates.TemplateRefusalError:  # perhaps of a lone user turn
        return ()
    # Tokenised with a text after it: its last token may merge with what follows.
    first_ids, second_ids = (one.token_ids for one in encode(tokenizer, [first, second], False))
    return first_ids[: num_equal(first_ids, second_ids)]
