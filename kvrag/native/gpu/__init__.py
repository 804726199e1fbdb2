"""The kernels for NVIDIA GPUs. They need ``pip install 'kvrag[gpu]'`` and a CUDA build of torch.

Payloads are bit for bit those of `kvrag.native`. Arguments are torch tensors on one GPU. Work
goes to torch's current stream, and no function waits for the whole device. The kernels are
compiled on first use and cached in ``~/.cache/kvrag`` (``KVRAG_CACHE``).

So far these kernels have been compiled for sm_80 and sm_90, and emulated with CPU threads to
compare them with the CPU's kernels. They have not run on a GPU. `tests/native/test_gpu.py` holds
the tests that must pass there.

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
