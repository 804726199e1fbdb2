"""Kernels of ``cuda/triton`` over rows against PyTorch, on a card: ``python tools/gpu_kernels.py``.

For models of some shapes, one layer of random weights: how far kernels are off, and what a layer
takes, in milliseconds. With TRITON_INTERPRET=1 and ``cpu``, Triton's interpreter plays the card,
with a small shape and without times. Prints JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvrag.kvcache import FusedKV, KVSpec
from kvrag.models import cardlayers
from kvrag.models.cardlayers import CardLayers
from kvrag.models.compiled import describe_layers
from kvrag.native.gpu import tiled
from kvrag.positions.rotary import RotaryPositions

DEVICE = torch.device(sys.argv[1] if len(sys.argv) > 1 else "cuda")
# Model type, width, inner width, query heads, key heads, head size.
SHAPES = {
    "llama-3.1-8b": ("llama", 4096, 14336, 32, 8, 128),
    "qwen2.5-0.5b": ("qwen2", 896, 4864, 14, 2, 64),
    "qwen3-8b": ("qwen3", 4096, 12288, 32, 8, 128),
    "gemma-2-9b": ("gemma2", 3584, 14336, 16, 8, 256),
}
SMALL = {"small": ("llama", 64, 96, 4, 2, 16)}
NUM_TOKENS = 5001 if DEVICE.type == "cuda" else 100


def layer_of(shape: tuple[Any, ...]) -> Any:
    """Return a model of two layers of a shape, in bfloat16 on a card and in float32 otherwise."""
    kind, width, inner, asked, given, head_dim = shape
    config = AutoConfig.for_model(
        kind,
        hidden_size=width,
        intermediate_size=inner,
        num_attention_heads=asked,
        num_key_value_heads=given,
        head_dim=head_dim,
        num_hidden_layers=2,
        vocab_size=64,
    )
    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
    with DEVICE:
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def milliseconds(run: Callable[[], None]) -> float | None:
    """Return what a call takes on the card."""
    if DEVICE.type != "cuda":
        return None
    run()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(10):
        run()
    torch.cuda.synchronize()
    return round((time.perf_counter() - began) * 100, 3)


@torch.no_grad()
def measured(shape: tuple[Any, ...]) -> dict[str, Any]:
    """Return what is told of a shape."""
    model = layer_of(shape)
    layers, width, num_given, head_dim = model.model.layers, shape[1], shape[4], shape[5]
    kinds = getattr(model.config, "layer_types", None) if shape[0].startswith("gemma3") else None
    positions = torch.arange(NUM_TOKENS, device=DEVICE)
    tables = RotaryPositions(model.model.rotary_emb, kinds or [None] * 2).tables(positions)
    described = describe_layers(layers, [None, None], tables)
    assert described is not None
    found: dict[str, Any] = {"error": cardlayers.difference(described, DEVICE)}
    found["most"] = tiled.MOST_ERROR[described.dtype]
    fused = FusedKV(KVSpec(2, num_given, head_dim, described.dtype), NUM_TOKENS, NUM_TOKENS, DEVICE)
    compiled = CardLayers(described)
    for num_rows in (31, 781, 4096) if DEVICE.type == "cuda" else (7,):
        rows = torch.randperm(NUM_TOKENS, device=DEVICE)[:num_rows].sort().values
        hidden = torch.randn(num_rows, width, device=DEVICE, dtype=described.dtype)
        last = int(rows[-1])

        def run(rows: Any = rows, hidden: Any = hidden, last: int = last) -> None:
            compiled.run_rows(0, hidden, compiled.prepare(rows, fused, tables[0], last, None))

        run()
        found[f"layer_ms_{num_rows}"] = milliseconds(run)
    return found


def main() -> None:
    """Print what is found, and end with 1 if a kernel is wrong."""
    shapes = SHAPES if DEVICE.type == "cuda" else SMALL
    ahead = bool(tiled._compiled())
    found: dict[str, Any] = {}
    try:
        for name, shape in shapes.items():
            found[name] = measured(shape)
    finally:
        print(json.dumps({"architecture": tiled.architecture(DEVICE), "ahead": ahead, **found}))
    sys.exit(any(one["error"] > one["most"] for one in found.values()))


if __name__ == "__main__":
    main()
