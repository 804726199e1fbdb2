"""Times the kernels on one thread, to compare instruction sets with each other and the reference.

python -m tools.reference_cost
KVRAG_ISA=reference python -m tools.reference_cost
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from kvrag.native import (
    FewRowsLinear,
    Points,
    RansModel,
    VisibleKeys,
    attend,
    decode_rows,
    encode_rows,
    instruction_set,
    reconstruct,
)

_FREQUENCIES = np.array([[1024, 1024, 1024, 512, 256, 128, 64, 64]], np.uint16)


def main() -> None:
    """Print a line for each kernel: the least processor time of several runs."""
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    model = RansModel(_FREQUENCIES)
    symbols = rng.choice(8, size=(576, 512), p=_FREQUENCIES[0] / 4096).astype(np.uint8)
    classes = np.zeros(576, np.uint16)
    payload = encode_rows(model, symbols, classes, 2)
    found = np.empty_like(symbols)
    basis = rng.standard_normal((3, 192, 64)).astype(np.float32)
    placed = torch.empty(3, 512, 64)
    keys, rows = torch.randn(3, 2048, 64), torch.randn(9, 64, 64)
    layer, row = FewRowsLinear(torch.randn(1536, 576)), torch.randn(1, 576)
    last = np.arange(1984, 2048)
    runs: dict[str, Callable[[], object]] = {
        "entropy decoding": lambda: decode_rows(model, payload, classes, found),
        "entropy coding": lambda: encode_rows(model, symbols, classes, 2),
        "inverse transform": lambda: reconstruct(Points(symbols[:192]), basis, None, placed),
        "attention of 64 rows": lambda: attend(rows, keys, keys, VisibleKeys(last), scale=0.1),
        "attention of a row": lambda: attend(
            rows[:, -1:], keys, keys, VisibleKeys(last[-1:]), scale=0.1
        ),
        "linear layer": lambda: layer(row),
    }
    print(instruction_set())
    for name, run in runs.items():
        print(f"{name:22} {1e3 * min(_seconds(run) for _ in range(10)):8.2f} ms")


def _seconds(run: Callable[[], object]) -> float:
    began = time.process_time()
    run()
    return time.process_time() - began


if __name__ == "__main__":
    main()
