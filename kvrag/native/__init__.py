"""The compiled kernels: entropy coding, reconstruction, and attention of scattered rows.

All functions take numpy arrays or torch CPU tensors and work on their memory without copying it.
They check arguments before they call a kernel, and release the GIL while it runs. The kernels are
in ``cuda/``: headers with one copy of each algorithm for CPU and GPU, and the CPU's vector code.
The import of this package chooses the instruction set. To choose another, set
``KVRAG_ISA=scalar|avx2|avx512|avx512vbmi2|avx512bf16|amxbf16|neon`` in the environment. Where
nothing was compiled, or with ``KVRAG_ISA=reference``, numpy and torch compute
(`kvrag.native.reference`).

- `kvrag.native.entropy`: `RansModel`, `encode_rows`, `decode_rows`, `decode_many`, `ideal_bits`.
- `kvrag.native.reconstruction`: `reconstruct`, `place_channels`, `Points`, `Patches`,
  `Rotation`, `contexts`, `refine`.
- `kvrag.native.attention`: `attend`, `VisibleKeys`, `Mass`, `attend_each`, `Buffers`,
  `ATTENTION_TYPES`.
- `kvrag.native.elements`: `rms_norm`, `gated`, `rotate`.
- `kvrag.native.layers`: `RowLayers`, `HAS_ROW_LAYERS`.
- `kvrag.native.linear`: `FewRowsLinear`, `Int8Linear`, `MAX_INT8_INPUTS`, `MAX_ROWS`.
- `kvrag.native.instructions`: `instruction_set`, `instruction_sets`, `use_instruction_set`.
"""

from __future__ import annotations

from kvrag.native.attention import (
    ATTENTION_TYPES,
    Buffers,
    Mass,
    VisibleKeys,
    attend,
    attend_each,
)
from kvrag.native.elements import gated, rms_norm, rotate
from kvrag.native.entropy import (
    DecodeJob,
    RansModel,
    decode_many,
    decode_rows,
    encode_rows,
    ideal_bits,
)
from kvrag.native.instructions import instruction_set, instruction_sets, use_instruction_set
from kvrag.native.kernels import REFERENCE
from kvrag.native.layers import HAS_ROW_LAYERS, RowLayers
from kvrag.native.linear import MAX_INT8_INPUTS, MAX_ROWS, FewRowsLinear, Int8Linear
from kvrag.native.reconstruction import (
    Patches,
    Points,
    Rotation,
    contexts,
    place_channels,
    reconstruct,
    refine,
)

__all__ = [
    "ATTENTION_TYPES",
    "HAS_ROW_LAYERS",
    "MAX_INT8_INPUTS",
    "MAX_ROWS",
    "REFERENCE",
    "Buffers",
    "DecodeJob",
    "FewRowsLinear",
    "Int8Linear",
    "Mass",
    "Patches",
    "Points",
    "RansModel",
    "Rotation",
    "RowLayers",
    "VisibleKeys",
    "attend",
    "attend_each",
    "contexts",
    "decode_many",
    "decode_rows",
    "encode_rows",
    "gated",
    "ideal_bits",
    "instruction_set",
    "instruction_sets",
    "place_channels",
    "reconstruct",
    "refine",
    "rms_norm",
    "rotate",
    "use_instruction_set",
]
