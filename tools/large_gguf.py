"""Llama 3.1 8B's shape in random Q4_K: what it takes from disk to answers; prints JSON.

``OMP_NUM_THREADS=2 python -m tools.large_gguf FOLDER [LAYERS]`` writes ``FOLDER/large.gguf``
(4.5 GB), converts it as ``--model`` does at its first use, and loads it in a fresh process, while
no cache has its pages.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

HIDDEN, INNER, HEADS, KV_HEADS, VOCABULARY = 4096, 14336, 32, 8, 128_256
BLOCK, BLOCK_BYTES = 256, 144
_STEPS, _COPIED = 16, 1 << 28


def write(path: Path, num_layers: int) -> None:
    """Write the file: weights around zero with a spread of about 0.02."""
    import gguf

    writer = gguf.GGUFWriter(str(path), "llama", use_temp_file=False)
    writer.add_context_length(8192)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(num_layers)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(500_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    # The bytes, as byte-level BPE writes them, and names for the rest.
    tokens = [chr(one) for one in (*range(33, 127), *range(161, 173), *range(174, 324))][:256]
    tokens += ["he", *(f"<{number}>" for number in range(257, VOCABULARY))]
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * VOCABULARY)
    writer.add_token_merges(["h e"])
    writer.add_eos_token_id(VOCABULARY - 1)
    width = HIDDEN // HEADS * KV_HEADS
    layer = {"attn_q": (HIDDEN, HIDDEN), "attn_k": (width, HIDDEN), "attn_v": (width, HIDDEN)}
    layer |= {"attn_output": (HIDDEN, HIDDEN), "ffn_gate": (INNER, HIDDEN)}
    layer |= {"ffn_up": (INNER, HIDDEN), "ffn_down": (HIDDEN, INNER)}
    shapes = {f"blk.{n}.{name}": one for n in range(num_layers) for name, one in layer.items()}
    shapes |= {"token_embd": (VOCABULARY, HIDDEN), "output": (VOCABULARY, HIDDEN)}
    kind = gguf.GGMLQuantizationType.Q4_K
    for name, (rows, columns) in shapes.items():
        num_bytes = columns // BLOCK * BLOCK_BYTES
        shape = (rows, num_bytes)
        writer.add_tensor_info(
            f"{name}.weight", shape, np.dtype(np.uint8), rows * num_bytes, raw_dtype=kind
        )
    norms = [f"blk.{n}.{name}" for n in range(num_layers) for name in ("attn_norm", "ffn_norm")]
    for name in (*norms, "output_norm"):
        size = np.dtype(np.float32)
        writer.add_tensor_info(f"{name}.weight", (HIDDEN,), size, HIDDEN * size.itemsize)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    rng = np.random.default_rng(0)
    for rows, columns in shapes.values():
        blocks = rng.integers(0, 256, (rows * columns // BLOCK, BLOCK_BYTES), np.uint8)
        # Half-precision scale and least value of a block: 31.5 sixths of 7.5 steps are the middle.
        blocks[:, :4] = np.array([1e-4, 7.5e-4], np.float16).view(np.uint8)
        writer.write_tensor_data(blocks.reshape(rows, -1))
    for _ in (*norms, "output_norm"):
        writer.write_tensor_data(np.ones(HIDDEN, np.float32))
    writer.close()


def forget(folder: Path) -> None:
    """Drop a folder's files from the page cache, as far as nobody has them mapped."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_seconds(path: Path) -> float:
    """Return what reading a file takes."""
    started = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        buffer = bytearray(1 << 24)
        while file.readinto(buffer):
            pass
    return time.perf_counter() - started


def memory(kind: str) -> int:
    """Return a figure of this process's memory, in bytes: ``VmRSS`` or ``VmHWM``."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(one.split()[1]) for one in lines if one.startswith(kind)) * 1024


def copy_rate() -> tuple[float, float]:
    """Return the bytes that are copied in a second, of wall and of processor time."""
    import torch

    source, target = torch.ones(_COPIED // 4), torch.empty(_COPIED // 4)
    target.copy_(source)
    wall, processor = time.perf_counter(), time.process_time()
    for _ in range(4):
        target.copy_(source)
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    return 4 * _COPIED / wall, 4 * _COPIED * torch.get_num_threads() / processor


def measure(path: Path) -> dict[str, Any]:
    """Load the model, and write tokens of an answer and copy memory in turn."""
    import torch

    from kvrag.fusion.decoding import RowDecoder
    from kvrag.fusion.fuser import fuse
    from kvrag.fusion.layout import Layout
    from kvrag.fusion.policies.base import NonePolicy
    from kvrag.kvcache import FusedKV
    from kvrag.models.kv_model import KVModel

    before = memory("VmRSS")
    started = time.perf_counter()
    model = KVModel.load(path)
    loaded = time.perf_counter() - started
    layout = Layout(tuple(range(40, 72)), (), 0, True, {})
    kv = FusedKV(model.spec, 32, 32 + _STEPS * 4)
    prompt = fuse(model, layout, lambda *_: None, NonePolicy(), kv)
    decoder, token = RowDecoder(model, prompt), int(prompt.logits.argmax())
    first = time.perf_counter() - started
    taken = memory("VmHWM") - before
    rates: list[dict[str, float]] = []
    written = [token]
    for _ in range(3):
        wall, processor = time.perf_counter(), time.process_time()
        for _ in range(_STEPS):
            token = int(decoder.step(token).argmax())
            written.append(token)
        wall, processor = time.perf_counter() - wall, time.process_time() - processor
        by_wall, by_processor = copy_rate()
        size = path.stat().st_size
        rates.append(
            {
                "tokens_per_second": _STEPS / wall,
                "share": _STEPS / wall / (by_wall / size),
                "share_by_processor_time": _STEPS
                * torch.get_num_threads()
                / processor
                / (by_processor / size),
                "copied_gb_per_second": by_wall / 1e9,
            }
        )
    return {
        "load_seconds": loaded,
        "load_and_first_token_seconds": first,
        "peak_bytes": taken,
        "peak_over_file": taken / path.stat().st_size,
        "finite": bool(prompt.logits.isfinite().all()),
        "different_tokens": len(set(written)),
        "rates": rates,
        "compute": model.compute,
    }


def _elsewhere(job: str, path: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "tools.large_gguf", job, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _convert(path: Path) -> dict[str, Any]:
    from kvrag.models.kv_model import KVModel
    from kvrag.models.references import resolve_model

    before, started = memory("VmRSS"), time.perf_counter()
    folder = resolve_model(path, is_small=True)
    seconds, taken = time.perf_counter() - started, memory("VmHWM") - before
    KVModel.load(path)  # what Transformers says of the files is kept for later processes
    return {"folder": folder, "convert_seconds": seconds, "convert_peak_bytes": taken}


def main() -> None:
    """Do all of it, each step in a separate process."""
    job, given = sys.argv[1], Path(sys.argv[-1])
    if job in ("--convert", "--measure"):
        print(json.dumps(_convert(given) if job == "--convert" else measure(given)))
        return
    if job.startswith("-"):
        sys.exit(__doc__)
    folder = Path(job)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "large.gguf"
    if not path.exists():
        write(path, int(sys.argv[2]) if len(sys.argv) > 2 else 32)
    os.environ["KVRAG_MODELS"] = str(folder / "models")
    found = {"file_bytes": path.stat().st_size, **_elsewhere("--convert", path)}
    forget(folder)
    found["read_seconds"] = read_seconds(path)
    forget(folder)
    found |= _elsewhere("--measure", path)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
