"""Rates of a card, of which floors are made: ``python tools/gpu_rates.py``.

Prints JSON. With ``cpu``, matrices are small.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Callable

import torch
import transformers


def main(device: torch.device) -> None:
    """Print what is measured, as far as it goes."""
    is_card = device.type == "cuda"
    size = 8192 if is_card else 512

    def rate(run: Callable[[], object], amount: float) -> float:
        for number in range(7):
            if number == 2:
                if is_card:
                    torch.cuda.synchronize()
                began = time.perf_counter()
            run()
        if is_card:
            torch.cuda.synchronize()
        return amount * 5 / (time.perf_counter() - began)

    found: dict[str, str | float] = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "card": torch.cuda.get_device_name() if is_card else platform.processor(),
    }
    try:
        one = torch.randn(size, size, dtype=torch.bfloat16, device=device)
        there, other = torch.empty_like(one), torch.randn_like(one)
        num_bytes = one.nbytes
        host = torch.empty(one.shape, dtype=one.dtype, pin_memory=is_card)
        found["matrix_tflops"] = rate(lambda: one @ other, 2 * size**3) / 1e12
        found["memory_gb_s"] = rate(lambda: there.copy_(one), 2 * num_bytes) / 1e9
        copying = rate(lambda: there.copy_(host, non_blocking=True), num_bytes)
        found["host_to_card_gb_s"] = copying / 1e9
        if is_card:
            begun = torch.zeros(1, device=device)
            found["launch_us"] = 1e6 / rate(lambda: begun.add_(1), 1)
    finally:
        print(json.dumps(found))


if __name__ == "__main__":
    main(torch.device(sys.argv[1] if len(sys.argv) > 1 else "cuda"))
