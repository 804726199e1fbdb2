"""Random-weight models of real shapes: right for timing and exactness, useless for quality."""

from __future__ import annotations

import random
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from kvrag.errors import ParameterError
from kvrag.models.kv_model import KVModel
from kvrag.models.references import usable_device

SHAPES: dict[str, dict[str, Any]] = {
    # The published configuration of Qwen2.5-0.5B.
    "qwen2.5-0.5b": {
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
    # The shape for timing serving. It is a Llama: when a saved Qwen2 is loaded, Transformers gives
    # it Qwen2's own tokenizer, whatever the folder has.
    "100m": {
        "model_type": "llama",
        "vocab_size": 8192,
        "hidden_size": 640,
        "intermediate_size": 2560,
        "num_hidden_layers": 16,
        "num_attention_heads": 10,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    # The published configuration of Llama 3.1 8B, for a GPU: 16 GB in bfloat16.
    "llama-3.1-8b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    # That of SmolLM2-135M: of its steps attention is a larger part.
    "smollm2-135m": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    },
    # Small enough for a test: every code path, no figure worth quoting.
    "test": {
        "vocab_size": 5000,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}

_NUM_WORDS = 4096


def random_model(shape: str, seed: int = 0, device: str | None = None) -> KVModel:
    """Return a model with random weights and a tokenizer of one token a word.

    It is float32 on the CPU, and bfloat16 on a GPU.

    Parameters
    ----------
    shape
        A name in `SHAPES`.
    seed
        What the weights are drawn from.
    device
        Where the model runs, such as ``"cuda"``; None means the CPU.

    Raises
    ------
    ParameterError
        For an unknown shape, or a device that is not there.
    """
    if shape not in SHAPES:
        raise ParameterError(f"unknown shape {shape!r}; known: {', '.join(SHAPES)}")
    values = dict(SHAPES[shape])
    make_config = LlamaConfig if values.pop("model_type", "qwen2") == "llama" else Qwen2Config
    config = make_config(**values, bos_token_id=0, eos_token_id=1)
    place = usable_device(device or "cpu")
    dtype = torch.float32 if place.type == "cpu" else torch.bfloat16
    # Drawn where they stay: gigabytes take minutes on a CPU.
    with torch.random.fork_rng(devices=[place] if place.type == "cuda" else []), place:
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    return KVModel(model.eval(), _word_tokenizer(), name=f"random {shape}")


def chosen_model(name: str | None, shape: str, device: str | None = None) -> KVModel:
    """Return a model by its name, or random weights of a shape if there is none.

    Raises
    ------
    ParameterError, ModelLoadError, UnsupportedModelError
    """
    return KVModel.load(name, device=device) if name else random_model(shape, device=device)


def random_words() -> list[str]:
    """Return the words of random texts."""
    syllables = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]
    return [a + b for a in syllables for b in syllables][:_NUM_WORDS]


def _word_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {"<bos>": 0, "<eos>": 1, "<unk>": 2}
    vocabulary |= {word: len(vocabulary) + i for i, word in enumerate(random_words())}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 0)]
    )
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )


def random_text(model: KVModel, num_tokens: int, seed: int) -> str:
    """Return words that are exactly `num_tokens` tokens of the model's tokenizer.

    Raises
    ------
    ParameterError
        When the tokenizer splits text in a way that no cut gives that count.
    """
    draw = random.Random(seed)
    words = draw.choices(random_words(), k=num_tokens)
    encode = model.tokenizer.backend_tokenizer.encode
    text = " ".join(words)
    offsets = encode(text, add_special_tokens=False).offsets
    # A word may be several tokens: cut after the last character of the last token wanted.
    text = text[: offsets[num_tokens - 1][1]]
    found = len(encode(text, add_special_tokens=False).ids)
    if found != num_tokens:
        raise ParameterError(
            f"could not make a text of {num_tokens} tokens with this tokenizer (got {found})"
        )
    return text
