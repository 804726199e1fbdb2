"""The kernels for NVIDIA GPUs. They need ``pip install 'kvrag[gpu]'`` and a CUDA build of torch.

Payloads are bit for bit those of `kvrag.native`. Arguments are torch tensors on one GPU. Work
goes to torch's current stream, and no function waits for the whole device. The kernels are
compiled on first use and cached in ``~/.cache/kvrag`` (``KVRAG_CACHE``).

They have run on sm_90 (an H200), where `tests/native/test_gpu.py` passed. Everywhere, its tests
emulate them with CPU threads and compare them with the CPU's kernels.

- `kvrag.native.gpu.entropy`: `DeviceTables`, `encode_rows`, `decode_rows`, `Verdict`.
- `kvrag.native.gpu.reconstruction`: `reconstruct`, `place_channels`, `contexts`, `refine`.
- `kvrag.native.gpu.compiling`: from the sources in ``cuda/`` to kernels.
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
