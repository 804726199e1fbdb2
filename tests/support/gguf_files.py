"""A small GGUF file, written on the spot: Llama's layers with random weights."""

import json
from pathlib import Path

import gguf
import numpy as np

from tests.support.models import CHAT_TEMPLATE, VOCAB_SIZE, make_tokenizer

HIDDEN = 64
LAYERS = 2
HEADS, KV_HEADS = 4, 2
INNER = 128
END_OF_TURN = 2


def write_gguf(
    path: Path,
    *,
    kind: str = "Q4_0",
    chat_template: str | None = CHAT_TEMPLATE,
    architecture: str = "llama",
    seed: int = 0,
) -> dict[str, np.ndarray]:
    """Write a GGUF file whose matrices are quantised as `kind`; return what they dequantise to."""
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_name("small")
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB_SIZE)
    backend = make_tokenizer().backend_tokenizer
    tokens = [backend.id_to_token(number) for number in range(VOCAB_SIZE)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
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
    width = HIDDEN // HEADS
    shapes = {"token_embd.weight": (VOCAB_SIZE, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {
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
    written = {}
    wanted = gguf.GGMLQuantizationType[kind]
    for name, shape in shapes.items():
        values = rng.normal(0, 0.2, shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(name, values + 1)
            written[name] = values + 1
            continue
        raw = gguf.quants.quantize(values, wanted)
        writer.add_tensor(name, raw, raw_dtype=wanted)
        written[name] = gguf.quants.dequantize(raw, wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written
