"""The kernels for NVIDIA GPUs. They need ``pip install 'kvrag[gpu]'`` and a CUDA build of torch.

Payloads are bit for bit those of `kvrag.native`. Arguments are torch tensors on one GPU, work goes
to torch's current stream, and no function waits for the whole device. `compiling.py` compiles the
kernels on first use into ``~/.cache/kvrag`` (``KVRAG_CACHE``). Tests emulate them on the CPU.
Kernels of ``cuda/triton`` are started by `tiled.py`; `rows.py` has a decoder layer's.
"""

from __future__ import annotations

from kvrag.native.gpu.entropy import DeviceTables, Verdict, decode_rows, encode_rows
from kvrag.native.gpu.reconstruction import contexts, place_channels, reconstruct, refine

__all__ = [
    "DeviceTables",
    "Verdict",
    "contexts",
    "decode_rows",
    "encode_rows",
    "place_channels",
    "reconstruct",
    "refine",
]
