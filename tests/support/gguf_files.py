"""Small GGUF files, written on the spot as llama.cpp's converter writes them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from kvrag.weights.packing import KINDS
from tests.support.models import CHAT_TEMPLATE, VOCAB_SIZE, make_tokenizer

HIDDEN = 64
LAYERS = 2
HEADS, KV_HEADS = 4, 2
INNER = 128
END_OF_TURN = 2
WITH_LEAST = ("Q4_1", "Q5_1", "Q4_K", "Q5_K")
_ADD_ONE = ("gemma", "gemma2", "gemma3", "nemotron")
_IN_PAIRS = ("llama", "mistral3", "granite", "smollm3")


def write_gguf(
    path: Path,
    *,
    kind: str = "Q4_0",
    chat_template: str | None = CHAT_TEMPLATE,
    architecture: str = "llama",
    seed: int = 0,
    fields: Mapping[str, Any] | None = None,
    more: Mapping[str, np.ndarray] | None = None,
    has_tokenizer: bool = True,
    pre: str | None = "gpt-2",
) -> dict[str, np.ndarray]:
    """Write Llama's layers with random weights; return what they dequantise to.

    Parameters
    ----------
    kind
        How matrices are quantised.
    fields
        Metadata in place of the usual, by names without the architecture; None leaves one out.
    more
        More tensors, in float32; one without numbers leaves the usual one out.
    pre
        What text is cut into words by.
    """
    rng = np.random.default_rng(seed)
    width = HIDDEN // HEADS
    tensors = {"token_embd.weight": (VOCAB_SIZE, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        tensors |= {
            f"blk.{layer}.attn_norm.weight": (HIDDEN,),
            f"blk.{layer}.attn_q.weight": (HIDDEN, HIDDEN),
            f"blk.{layer}.attn_k.weight": (KV_HEADS * width, HIDDEN),
            f"blk.{layer}.attn_v.weight": (KV_HEADS * width, HIDDEN),
            f"blk.{layer}.attn_output.weight": (HIDDEN, HIDDEN),
            f"blk.{layer}.ffn_norm.weight": (HIDDEN,),
            f"blk.{layer}.ffn_gate.weight": (INNER, HIDDEN),
            f"blk.{layer}.ffn_up.weight": (INNER, HIDDEN),
            f"blk.{layer}.ffn_down.weight": (HIDDEN, INNER),
        }
    values = {
        name: rng.normal(0, 0.2, shape).astype(np.float32) + (len(shape) == 1)
        for name, shape in tensors.items()
    }
    values |= dict(more or {})
    usual = {
        "context_length": 512,
        "embedding_length": HIDDEN,
        "block_count": LAYERS,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "rope.dimension_count": width,
        "rope.freq_base": 10_000.0,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "vocab_size": VOCAB_SIZE,
    }
    usual |= fields or {}
    kinds = dict.fromkeys(values, kind)
    return _write(path, architecture, usual, values, kinds, chat_template, has_tokenizer, pre)


def _write(
    path: Path,
    architecture: str,
    fields: Mapping[str, Any],
    values: Mapping[str, np.ndarray],
    kinds: Mapping[str, str],
    chat_template: str | None,
    has_tokenizer: bool,
    pre: str | None = "gpt-2",
) -> dict[str, np.ndarray]:
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_name("small")
    for name, value in fields.items():
        if value is None:
            continue
        add: Any = {
            bool: writer.add_bool,
            float: writer.add_float32,
            int: writer.add_uint32,
            str: writer.add_string,
            list: writer.add_array,
        }[type(value)]
        add(f"{architecture}.{name}", value)
    if has_tokenizer:
        _add_tokenizer(writer, chat_template, pre)
    written = {}
    for name, value in values.items():
        wanted = gguf.GGMLQuantizationType[kinds[name]]
        if not value.size:
            continue
        if value.ndim == 1:
            writer.add_tensor(name, value)
            written[name] = value
            continue
        if "_K" in kinds[name]:  # which the package does not write
            raw = random_blocks(kinds[name], value.shape[0], value.shape[1] // 256)
        else:
            raw = gguf.quants.quantize(value, wanted)
        writer.add_tensor(name, raw, raw_dtype=wanted)
        written[name] = gguf.quants.dequantize(raw, wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written


def random_blocks(kind: str, num_rows: int, num_blocks: int) -> np.ndarray:
    """Return rows of blocks whose scales are finite."""
    rng = np.random.default_rng(len(kind) + num_rows)
    size = KINDS[kind][0]
    blocks = rng.integers(0, 256, (num_rows * num_blocks, size), dtype=np.uint8)
    places = [208] if kind == "Q6_K" else [0, 2] if kind in WITH_LEAST else [0]
    for place in places:
        halves = rng.normal(0, 0.01, (len(blocks), 1)).astype(np.float16)
        blocks[:, place : place + 2] = halves.view(np.uint8)
    return blocks.reshape(num_rows, -1)


def _add_tokenizer(writer: gguf.GGUFWriter, chat_template: str | None, pre: str | None) -> None:
    backend = make_tokenizer().backend_tokenizer
    tokens = [backend.id_to_token(number) for number in range(VOCAB_SIZE)]
    writer.add_tokenizer_model("gpt2")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(
        [
            gguf.TokenType.CONTROL
            if token in ("<bos>", "<eos>", "<pad>")
            else gguf.TokenType.NORMAL
            for token in tokens
        ]
    )
    merges = json.loads(backend.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_eot_token_id(END_OF_TURN)
    writer.add_add_bos_token(False)
    if chat_template is not None:
        writer.add_chat_template(chat_template)


def write_model(
    path: Path,
    hf: Any,
    architecture: str,
    *,
    fields: Mapping[str, Any],
    more: Mapping[str, np.ndarray] | None = None,
    kind: str = "Q8_0",
) -> None:
    """Write a model of Transformers, and give it the weights that the file dequantises to.

    Parameters
    ----------
    fields
        What its architecture's files say beside sizes, by names without the architecture.
    more
        Tensors that are no weights.
    kind
        How matrices are quantised.
    """
    import torch

    config = hf.config
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    theirs = next(one for one, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(theirs, config.num_hidden_layers)
    is_norm = not hasattr(config, "rms_norm_eps")
    usual = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        f"attention.layer_norm_{'' if is_norm else 'rms_'}epsilon": 1e-5,
        **fields,
    }
    values: dict[str, np.ndarray] = {}
    places: dict[str, Any] = {}
    tied = set(hf._tied_weights_keys or ()) if config.tie_word_embeddings else set()
    is_gpt_oss = architecture == "gpt-oss"
    for name, tensor in hf.state_dict().items():
        if name in tied:
            continue
        end = next((one for one in (".weight", ".bias", "_bias") if name.endswith(one)), "")
        base, last = name.removesuffix(end), ".bias" if "bias" in end else ".weight"
        if ".experts." in base:
            layer = f"blk.{base.split('.')[2]}.ffn"
            rows = tensor.mT if is_gpt_oss and tensor.ndim == 3 else tensor
            if base.endswith("down_proj"):
                places[f"{layer}_down_exps{last}"] = rows
                continue
            half = rows.shape[1] // 2
            for number, part in enumerate(("gate", "up")):
                of = (
                    slice(number, None, 2)
                    if is_gpt_oss
                    else slice(number * half, half + number * half)
                )
                places[f"{layer}_{part}_exps{last}"] = rows[:, of]
            continue
        found = names.get_name(base)
        assert found is not None, name
        places[found + last] = tensor
    for name, tensor in places.items():
        value = tensor.float()
        if architecture in _IN_PAIRS and (".attn_q." in name or ".attn_k." in name):
            value = _interleaved(value, heads if ".attn_q." in name else kv_heads)
        if architecture in _ADD_ONE and name.endswith("norm.weight"):
            value = value + 1
        values[name] = value.numpy()
    # As in published mixtures, these are finer.
    fine = "Q6_K" if kind == "Q4_K" else "Q8_0"
    kinds = {name: fine if "attn_v" in name or "ffn_down" in name else kind for name in values}
    kinds |= {name: "F32" for name in values if name.endswith(".bias")}
    if is_gpt_oss:
        kinds |= {name: "MXFP4" for name in values if "_exps.weight" in name}
    values |= dict(more or {})
    kinds |= dict.fromkeys(more or (), "F32")
    written = _write(path, architecture, usual, values, kinds, CHAT_TEMPLATE, True)
    with torch.no_grad():
        for name, tensor in places.items():
            value = torch.from_numpy(np.array(written[name]))
            if architecture in _IN_PAIRS and (".attn_q." in name or ".attn_k." in name):
                value = _apart(value, heads if ".attn_q." in name else kv_heads)
            if architecture in _ADD_ONE and name.endswith("norm.weight"):
                value = value - 1
            tensor.copy_(value.reshape(tensor.shape).to(torch.bfloat16))


def _interleaved(rows: Any, count: int) -> Any:
    """Put the two halves of each head's rows in turn, as llama.cpp rotates them."""
    return rows.unflatten(0, (count, 2, -1)).transpose(1, 2).flatten(0, 2)


def _apart(rows: Any, count: int) -> Any:
    return rows.unflatten(0, (count, -1, 2)).transpose(1, 2).flatten(0, 2)
