"""Loading: a path, hub name or loaded object becomes a model, its tokenizer and fingerprints."""

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
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kvrag import arguments, foreign
from kvrag.errors import ModelLoadError, ParameterError, UnsupportedModelError
from kvrag.models import templates
from kvrag.models.families import refuse_config
from kvrag.models.quantised import check_quantised, parts_of
from kvrag.models.small import small_layers
from kvrag.models.tokens import encode, num_equal
from kvrag.models.weightfiles import check_sizes
from kvrag.native import instruction_set
from kvrag.regularfile import require_regular_files
from kvrag.weights.cache import EXPECTED_MODEL, check_hub, convert, like
from kvrag.weights.named import EMBEDDED_MODEL
from kvrag.weights.sources import find_gguf

# These multiply float32 alone.
_WITHOUT_BFLOAT16 = ("scalar", "avx2", "avx512", "avx512vbmi2")
_EMBEDDED_FOLDER = str(Path(__file__).parent / "tiny")

_log = logging.getLogger(__name__)

# Config fields that change neither weights nor KV; loading alone fills in some of them.
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
        return _EMBEDDED_FOLDER
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


def from_pretrained(loader: Any, reference: str, **options: Any) -> Any:
    """Load from a folder or the hub's local cache; use the network only for a hub name.

    Python code that a model brings along is never run.

    Raises
    ------
    ModelLoadError
        Whatever the files lead the libraries to.
    """
    options = {"trust_remote_code": False, **options}
    is_folder = Path(reference).is_dir()
    try:
        if is_folder:
            require_regular_files(reference)
            return loader.from_pretrained(reference, local_files_only=True, **options)
        try:
            return loader.from_pretrained(reference, local_files_only=True, **options)
        except OSError:
            check_hub(reference)
            return loader.from_pretrained(reference, **options)
    except BaseException as error:
        raise _refused(reference, foreign.reason(error)) from error


def _refused(reference: str, why: str) -> ModelLoadError:
    if "trust_remote_code" in why:
        return ModelLoadError(
            f"could not load {arguments.shown(reference)}: it brings its own Python code, which "
            "kvrag never runs. Take a model of a type that Transformers has itself ('kvrag models "
            "list' names some)"
        )
    return ModelLoadError(
        f"could not load {arguments.shown(reference)}{like(reference)}: {why}. Expected a "
        "folder or hub repository with config.json, tokenizer.json and *.safetensors (pickled "
        "weights are not read)"
    )


def load_tokenizer(reference: str | Path) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer without its weights.

    Raises
    ------
    ModelLoadError
        When there is no tokenizer.
    UnsupportedModelError
        When the tokenizer is not a fast one: chunk boundaries need character offsets.
    """
    tokenizer: PreTrainedTokenizerBase = from_pretrained(
        AutoTokenizer, resolve_model(reference, is_small=None)
    )
    check_tokenizer(tokenizer)
    encode(tokenizer, ["Ab 1\n"], add_special_tokens=True)  # it may panic
    return tokenizer


def check_tokenizer(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return `tokenizer` if it reports character offsets, otherwise raise UnsupportedModelError."""
    if not tokenizer.is_fast:
        raise UnsupportedModelError(
            f"{type(tokenizer).__name__} is a slow tokenizer and reports no character offsets; "
            "convert it to a fast one (a tokenizer.json file)"
        )
    return tokenizer


def all_finite(tensor: torch.Tensor) -> bool:
    """Return whether all numbers of a tensor are finite."""
    # In float32, because 8-bit types have no such test.
    return bool(tensor.float().isfinite().all())


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


def read_config(reference: str, device: torch.device) -> PreTrainedConfig:
    """Return a decoder's configuration; of a model that also sees or hears, that of its text part.

    Only ``config.json`` is read or fetched.

    Parameters
    ----------
    reference
        The model's folder, or its hub name.
    device
        Where it is going to compute.

    Raises
    ------
    ModelLoadError
        When there is none, or its quantised weights cannot be read or computed.
    UnsupportedModelError
        When it says that the model cannot be served.
    """
    whole = from_pretrained(AutoConfig, reference)
    config: PreTrainedConfig = whole.get_text_config(decoder=True)
    if (twin := _TWINS.get(config.model_type)) is not None:
        config = CONFIG_MAPPING[twin](**_without_sections(config.to_dict()))
    config._name_or_path = whole._name_or_path
    config.tie_word_embeddings = whole.tie_word_embeddings
    refuse_config(config)
    quantised = getattr(whole, "quantization_config", None)
    if quantised is not None:
        config.quantization_config = check_quantised(reference, quantised, device)
    return config


# Text parts that are, without images, models that Transformers has by another name.
_TWINS = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
# Where checkpoints of models that also see keep the text part.
_TEXT_KEYS = {
    r"^language_model\.lm_head\.": "lm_head.",
    r"^(model\.)?language_model\.(model\.)?(?!lm_head)": "model.",
}


def _without_sections(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration's fields without the parts of rotary positions that images have."""
    rope = dict(fields.pop("rope_parameters", None) or {})
    rope.pop("mrope_section", None)
    rope.pop("mrope_interleaved", None)
    if rope.get("rope_type") == "mrope":
        rope["rope_type"] = "default"
    fields.pop("model_type")
    return fields | {"rope_parameters": rope}


def load_weights(
    reference: str | Path, dtype: torch.dtype | None, device: str | None
) -> PreTrainedModel:
    """Load a decoder in evaluation mode.

    Parameters
    ----------
    dtype
        Element type; None takes the checkpoint's; the embedded model runs in float32.
    device
        Device for the weights; None means the CPU.

    Raises
    ------
    ModelLoadError
        When the model does not exist or cannot be read.
    ParameterError
        When the device cannot be used here.
    """
    place = torch.device("cpu") if device is None else usable_device(device)
    path = resolve_model(reference)
    if dtype is None and path == _EMBEDDED_FOLDER:
        dtype = torch.float32
    config = read_config(path, place)
    try:
        check_sizes(path, config)
    except BaseException as error:
        raise _refused(path, foreign.reason(error)) from error
    # In a forked process PyTorch makes its threads again at their first use, which is not safe from
    # several threads, and Transformers loads in several.
    torch.set_num_threads(torch.get_num_threads())
    model: PreTrainedModel
    # Quantised weights may not be moved later.
    is_moved = place.type != "cpu" and hasattr(config, "quantization_config")
    model, found = from_pretrained(
        AutoModelForCausalLM,
        path,
        config=config,
        dtype="auto" if dtype is None else dtype,
        use_safetensors=True,
        output_loading_info=True,
        key_mapping=_TEXT_KEYS,
        **({"device_map": {"": place}} if is_moved else {}),
    )
    if missing := sorted(found["missing_keys"]):
        # Transformers would fill them with random numbers.
        raise ModelLoadError(
            f"could not load {arguments.shown(reference)}: its files lack {len(missing):,} weights "
            f"of the model that config.json describes, first {missing[0]}; restore the files"
        )
    if place.type != "cpu" and small_layers(model):
        raise ModelLoadError(
            f"{arguments.shown(reference)} keeps a GGUF file's bits, which only CPUs compute with "
            "here: name the file, not the folder of its conversion"
        )
    if place.type != "cpu" and not is_moved:
        model.to(place)  # type: ignore[arg-type]  # transformers' wrapper is untyped
    model.eval()  # type: ignore[no-untyped-call]
    return model


def has_bfloat16() -> bool:
    """Return whether this processor multiplies bfloat16; others convert each number first."""
    if instruction_set() in _WITHOUT_BFLOAT16:  # perhaps by choice (``KVRAG_ISA``)
        return False
    if platform.machine().lower() in ("arm64", "aarch64"):
        return True
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def model_fingerprint(model: PreTrainedModel) -> str:
    """Return a digest of all weights and the config, 32 hexadecimal digits.

    Models that differ in one weight, the element type or a setting have different fingerprints.
    Raise ModelLoadError if weights that stay in their bits are damaged.
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
                raw = part.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
                hashed[address] = xxhash.xxh3_128_digest(raw.numpy().data)
            digest.update(hashed[address])
    return digest.hexdigest()


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a digest of everything that decides a text's token ids, 32 hexadecimal digits."""
    definition = json.loads(tokenizer.backend_tokenizer.to_str())
    # The last caller of the tokenizer sets both; they are not part of it.
    definition.pop("padding", None)
    definition.pop("truncation", None)
    return hashlib.blake2b(
        json.dumps(definition, sort_keys=True).encode(), digest_size=16, person=b"kvrag-token"
    ).hexdigest()


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
