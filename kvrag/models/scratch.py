"""Memory that leaves the process when it is freed."""

from __future__ import annotations

import mmap

import torch

_LARGE_BYTES = 1 << 20


def scratch(num_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return memory for hidden states ``[num_rows, width]``.

    The C allocator would keep it. After one large block is freed, glibc takes later blocks of that
    size from its heap and holds them, beside the fused KV that then fills up.
    """
    num_bytes = num_rows * width * dtype.itemsize
    if device.type != "cpu" or num_bytes < _LARGE_BYTES:
        return torch.empty(num_rows, width, dtype=dtype, device=device)
    memory = mmap.mmap(-1, num_bytes)
    return torch.frombuffer(memory, dtype=dtype).view(num_rows, width)
