"""Loading by Transformers: configurations, tokenizers and models of all types that it knows."""

from __future__ import annotations

import copy
import json
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    __version__,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES
from transformers.quantizers.auto import (
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils import logging
from transformers.utils.quantization_config import QuantizationConfigMixin

from kvrag import arguments, plugins
from kvrag.errors import ModelLoadError, UnsupportedModelError
from kvrag.models.decoders import Decoder
from kvrag.models.families import INSTEAD, TESTED, WHOLE, find_family, refuse_config
from kvrag.models.quantised import check_quantised
from kvrag.models.references import EMBEDDED_FOLDER, resolve_model, usable_device
from kvrag.models.small import SmallEmbedding, SmallLinear, small_layers
from kvrag.models.weightfiles import TEXT_KEYS, check_sizes
from kvrag.native.kernels import IS_COMPILED
from kvrag.regularfile import require_regular_files
from kvrag.weights.cache import VERSION, check_hub, like
from kvrag.weights.packing import METHOD


def from_pretrained(loader: Any, reference: str, **options: Any) -> Any:
    """Load from a folder or the hub's local cache; use the network only for a hub name.

    Python code that a model brings along is never run.

    Raises
    ------
    ModelLoadError
        Whatever the files lead the libraries to.
    """
    _be_quiet()
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
        why = plugins.reason(error)
        wrong = LookupError | TypeError | AttributeError | json.JSONDecodeError
        if loader is AutoTokenizer and isinstance(error, wrong):
            why = f"its tokenizer.json, or tokenizer_config.json, is damaged ({why})"
        raise _refused(reference, why) from error


def _be_quiet() -> None:
    """Show no progress and no notes, if the command line wants none."""
    if os.environ.get("TRANSFORMERS_VERBOSITY") == "error":
        logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def _refused(reference: str, why: str) -> ModelLoadError:
    if "trust_remote_code" in why:
        return ModelLoadError(
            f"could not load {arguments.shown(reference)}: it brings its own Python code, which "
            "kvrag never runs. Take a model of a type that Transformers has itself ('kvrag models "
            "list' names some)"
        )
    for words, meaning in _MEANINGS.items():
        if found := re.search(words, why):
            why = meaning.format(*found.groups(), version=__version__)
            break
    return ModelLoadError(
        f"could not load {arguments.shown(reference)}{like(reference)}: {why.rstrip('.')}. "
        + (_RESTORE if why.startswith(_IN_CONFIG) else _EXPECTED)
    )


_RESTORE = "Restore that file, or fetch the model again"
_EXPECTED = (
    "Expected a folder or hub repository with config.json, tokenizer.json and *.safetensors "
    "(pickled weights are not read)"
)


_IN_CONFIG = "in its config.json, "
# What Transformers says at more length, to those who write its models.
_MEANINGS = {
    "Should have a `model_type` key": "it has no config.json that names its model_type",
    "model type `(.*?)` but Transformers does not recognize": "Transformers {version} has no "
    "models of its type, {0}; a newer version may have them",
    "config file at .* is not a valid JSON": "its config.json is no JSON",
    "argument of type 'NoneType'": "its config.json is no object of names and values",
    r"'(\w+)' with value (.*) doesn't match any type in \((?:<class ')?([\w\[\]]+)": f"{_IN_CONFIG}"
    "{0} is {1}; expected {2}",
    r"Field '(\w+)' expected (\w+), got (\w+)": f"{_IN_CONFIG}{{0}} is a {{2}}; expected {{1}}",
    r"`(\w+)` \((\d+)\) must be equal to the number of `(\w+)` \((\d+)\)": f"{_IN_CONFIG}{{2}} has "
    "{3} entries; expected {1}, as {0} is",
    r"`(\w+)` entries must be in": f"{_IN_CONFIG}{{0}} names a kind of layers that Transformers "
    "{version} does not know; expected such as full_attention",
    r"'s (\w+) field must have length (\d+), got (\d+)": f"{_IN_CONFIG}{{0}} of the rotary "
    "positions has {2} numbers; expected {1}, half as many as channels of a head that are rotated",
    r"Missing required keys in `rope_parameters` for 'rope_type'='(\w+)': {(.*)}": f"{_IN_CONFIG}"
    "rotary positions of type {0} lack {1}",
    r"Class validation error for validator .*\s*\w+: (.*)": f"{_IN_CONFIG}a field is wrong ({{0}})",
    "Couldn't instantiate the backend tokenizer": "it has no tokenizer.json",
    "You set `ignore_mismatched": "its weights have other shapes than its config.json describes",
    "^((?:Key|Index|Type|Attribute|ZeroDivision|Assertion)Error: .*|RuntimeError: Trying to .*)": (
        "Transformers cannot make the model that its config.json describes ({0})"
    ),
}


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
    from_pretrained(_Fields, reference)
    whole = from_pretrained(AutoConfig, reference)
    config: PreTrainedConfig = whole.get_text_config(decoder=True)
    if (twin := _TWINS.get(config.model_type)) is not None:
        config = CONFIG_MAPPING[twin](**_without_sections(config.to_dict()))
    config._name_or_path = whole._name_or_path
    refuse_config(config)
    kind = config.model_type
    if config.is_encoder_decoder or kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        raise UnsupportedModelError(
            f"model type {arguments.shown(kind)} is not supported: it encodes texts and "
            f"continues none. {INSTEAD}"
        )
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise UnsupportedModelError(
            f"model type {arguments.shown(config.model_type)} is not supported: Transformers has "
            f"no model of it that continues text. {INSTEAD}"
        )
    if not hasattr(config, "num_hidden_layers"):
        raise UnsupportedModelError(
            f"model type {arguments.shown(kind)} is not supported: its config.json names no stack "
            f"of decoder layers. {INSTEAD}"
        )
    if hasattr(whole, "tie_word_embeddings"):
        config.tie_word_embeddings = whole.tie_word_embeddings
    if config.model_type not in (*TESTED, *WHOLE):
        _check_structure(config)
    quantised = getattr(whole, "quantization_config", None)
    if quantised is not None:
        config.quantization_config = check_quantised(reference, quantised, device)
    return config


class _Fields:
    """What a ``config.json`` says, before Transformers completes and renames it."""

    @staticmethod
    def from_pretrained(reference: str, **options: Any) -> None:
        """Raise ModelLoadError for a number that a model would make NaN of."""
        _check_numbers(reference, PreTrainedConfig.get_config_dict(reference, **options)[0])


# Norms, frequencies and logits are divided by these, or take powers of them.
_DIVISOR = re.compile(
    r"(.*_)?(eps|epsilon|theta)|(low_freq_|high_freq_|attention_|short_|long_|partial_rotary_)?factor"
    "|rope_local_base_freq|rotary_(emb_base|pct)|logits_scaling|query_pre_attn_scalar|.*_softcapping"
    "|original_max_position_embeddings|attention_chunk_size"
)
_MOST = torch.finfo(torch.float32).max


def _check_numbers(reference: str, value: Any, path: str = "") -> None:
    if isinstance(value, dict | list):
        named = value if isinstance(value, dict) else {f"[{n}]": one for n, one in enumerate(value)}
        for key, one in named.items():
            _check_numbers(reference, one, f"{path}.{key}".replace(".[", "["))
        return
    name = path.rpartition(".")[2].partition("[")[0]
    is_divisor = value is not None and _DIVISOR.fullmatch(name) is not None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_good = is_number and abs(value) <= _MOST and (value > 0 or not is_divisor)
    # Infinity is a limit of time steps.
    if not (is_good or name.endswith("_limit")) and (is_divisor or is_number):
        raise ModelLoadError(
            f"{reference}/config.json: {path[1:]} is {arguments.shown(value)}, expected a finite "
            f"number{' above 0' if is_divisor else ''}; restore it, or fetch the model again"
        )


def _check_structure(config: PreTrainedConfig) -> None:
    """Refuse a model by its layers, before its weights are looked for."""
    short = copy.deepcopy(config)
    short.num_hidden_layers = min(config.num_hidden_layers, 2)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(short, trust_remote_code=False)  # type: ignore[no-untyped-call]
    except Exception:  # whatever a wrong configuration leads to: loading says it
        return
    find_family(model)


# Text parts that are, without images, models that Transformers has by another name.
_TWINS = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
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
    if dtype is None and path == EMBEDDED_FOLDER:
        dtype = torch.float32
    config = read_config(path, place)
    try:
        check_sizes(path, config)
    except BaseException as error:
        raise _refused(path, plugins.reason(error)) from error
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
        key_mapping=TEXT_KEYS,
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


def generation_of(folder: str, otherwise: Any) -> Any:
    """Return how a model is meant to generate, as its folder says if it does."""
    with suppress(OSError):
        return GenerationConfig.from_pretrained(folder, local_files_only=True)
    return otherwise


def over_weights(decoder: Decoder) -> PreTrainedModel:
    """Return Transformers' model over the weights of kvrag's decoder."""
    _be_quiet()
    folder = decoder.name_or_path
    config = read_config(folder, decoder.device)
    kind: Any = AutoModelForCausalLM._model_mapping[type(config)]
    given = {"dtype": decoder.dtype, "state_dict": decoder.state_dict()}
    model: PreTrainedModel = kind.from_pretrained(None, config=config, **given)
    model.name_or_path = config._name_or_path = folder
    model.generation_config = generation_of(folder, model.generation_config)
    model.eval()  # type: ignore[no-untyped-call]
    return model


@register_quantization_config(METHOD)
class _SmallConfig(QuantizationConfigMixin):
    """What ``config.json`` says of such weights."""

    def __init__(self, *, version: int, weights: dict[str, dict[str, Any]], **_: object) -> None:
        self.quant_method = METHOD  # type: ignore[assignment]  # a name of ours
        self.version, self.weights = version, weights


@register_quantizer(METHOD)
class _SmallQuantizer(HfQuantizer):
    """Puts layers over a GGUF file's bits in place of a model's own, while it is loaded."""

    requires_calibration = False
    quantization_config: _SmallConfig

    def validate_environment(self, *_: object, **__: object) -> None:
        if self.quantization_config.version != VERSION:
            raise ModelLoadError(
                f"this GGUF file was converted by another version of kvrag (format "
                f"{self.quantization_config.version}, expected {VERSION}); convert it again: kvrag "
                "models rm NAME"
            )
        if not IS_COMPILED:
            raise ModelLoadError("weights by groups need kvrag's compiled kernels: 'kvrag doctor'")

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **_: object) -> None:
        for name, described in self.quantization_config.weights.items():
            layer: Any = model.get_submodule(name)
            made: nn.Module
            if isinstance(layer, nn.Embedding):
                factor = getattr(layer, "scalar_embed_scale", None)
                made = SmallEmbedding(described, layer.weight.dtype, factor)
            else:
                made = SmallLinear(described, layer.bias)
            model.set_submodule(name, made)

    def _process_model_after_weight_loading(
        self, model: PreTrainedModel, **_: object
    ) -> PreTrainedModel:
        # A fingerprint has the configuration without it, and other numbers may change their type.
        loaded: Any = model
        del loaded.config.quantization_config
        loaded.is_quantized = False
        return model

    def is_serializable(self, *_: object) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False
