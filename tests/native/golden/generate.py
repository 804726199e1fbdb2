"""Write the golden payloads anew: ``python -m tests.native.golden.generate``.

They were written once, by the reference coder, and hold the format still: a change that breaks
them needs a new format version.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.native import reference_rans
from tests.native.cases import make_case

CASES = {
    "plain": (make_case(1, 7, 100), 1),
    "streams": (make_case(2, 11, 33), 4),
    "contexts": (make_case(3, 6, 65, num_symbols=40, with_context=True), 2),
    "narrow": (make_case(4, 50, 1), 3),
}


def main() -> None:
    for name, (case, num_streams) in CASES.items():
        arrays = {
            "frequencies": case.frequencies,
            "symbols": case.symbols,
            "classes": case.classes,
        }
        if case.context is not None:
            arrays["context"] = case.context
        payload = reference_rans.encode(
            case.frequencies, case.symbols, case.classes, num_streams, case.context
        )
        np.savez_compressed(
            Path(__file__).parent / f"rans-{name}.npz",
            payload=np.frombuffer(payload, np.uint8),
            num_streams=num_streams,
            **arrays,
        )


if __name__ == "__main__":
    main()
