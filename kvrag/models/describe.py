"""What `kvrag.models.decoders` needs to know of a model, found in the classes of Transformers."""

from __future__ import annotations

import json
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from kvrag.models.compiled import is_known
from kvrag.models.elements import ACTIVATIONS, KINDS, NORMS
from kvrag.models.families import TESTED, base_of, sliding_windows
from kvrag.models.pretrained import from_pretrained, generation_of, read_config
from kvrag.models.remembered import Remembered
from kvrag.models.tokens import check_tokenizer, facts_of
from kvrag.models.weightfiles import check_sizes
from kvrag.weights.packing import METHOD

# Others change with the length of a prompt.
_ROPE_TYPES = {"default", "linear", "llama3", "yarn"}


def describe(folder: str) -> Remembered | None:
    """Return what is worth keeping of the model in a folder; None if Transformers computes it.

    Raises
    ------
    ModelLoadError
        Whatever the files lead the libraries to.
    """
    config = read_config(folder, torch.device("cpu"))
    quantised = getattr(config, "quantization_config", None) or {}
    if config.model_type not in TESTED or quantised.get("quant_method", METHOD) != METHOD:
        return None
    check_sizes(folder, config)
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(config, trust_remote_code=False)  # type: ignore[no-untyped-call]
    layers = _layers(hf.eval())
    if layers is None:
        return None
    layers["small"] = quantised.get("weights", {})
    if quantised:
        del config.quantization_config
    tokenizer: Any = check_tokenizer(from_pretrained(AutoTokenizer, folder))
    generation = generation_of(folder, hf.generation_config)
    return Remembered(
        _plain(config.to_dict()),
        _plain(generation.to_dict()),
        layers,
        facts_of(tokenizer),
        _definition(tokenizer, folder),
    )


def _plain(fields: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(fields, default=str))
    return found


def _definition(tokenizer: Any, folder: str) -> str | None:
    """Return the definition of what tokenises; None if it is that of ``tokenizer.json``."""
    from tokenizers import Tokenizer

    backend = tokenizer.backend_tokenizer
    try:
        in_file = Tokenizer.from_file(f"{folder}/tokenizer.json")
    except Exception:  # its own class, for a file that is missing or wrong
        return str(backend.to_str())
    one, other = (json.loads(found.to_str()) for found in (backend, in_file))
    for found in (one, other):
        found["padding"] = found["truncation"] = None
    return None if one == other else json.dumps(one)


def _layers(hf: PreTrainedModel) -> dict[str, Any] | None:
    """Return how the layers of a model without weights are put together, if that is known."""
    base, config = base_of(hf), hf.config
    if not all(map(is_known, base.layers)):
        return None
    first: Any = base.layers[0]
    family = type(first).__name__.removesuffix("DecoderLayer")
    rotary = type(base.rotary_emb)(config)
    by_type = isinstance(rotary.rope_type, dict)
    types = rotary.rope_type if by_type else {"": rotary.rope_type}
    scalings = {layer.self_attn.scaling for layer in base.layers}
    if KINDS[family].caps or not _ROPE_TYPES.issuperset(types.values()) or len(scalings) > 1:
        return None
    adds_one, epsilon = NORMS[type(base.norm).__name__]
    return {
        "family": family,
        "shapes": {name: list(one.shape) for name, one in hf.state_dict().items()},
        "head_dim": first.self_attn.head_dim,
        "scaling": first.self_attn.scaling,
        "windows": sliding_windows(hf),
        "epsilon": getattr(base.norm, epsilon),
        "adds_one": adds_one,
        "is_gelu": ACTIVATIONS[type(first.mlp.act_fn).__name__],
        "factor": getattr(base.embed_tokens, "scalar_embed_scale", None),
        "rope_types": list(config.layer_types) if by_type else [None] * len(base.layers),
        "rope": {name: _rope(rotary, name, kind) for name, kind in types.items()},
    }


def _rope(rotary: Any, name: str, kind: str) -> dict[str, Any]:
    prefix = f"{name}_" if name else ""
    angles = getattr(rotary, f"{prefix}inv_freq").float().tolist()
    return {
        "type": kind,
        "angles": angles,
        "scaling": getattr(rotary, f"{prefix}attention_scaling"),
    }
