"""The compiled kernels, and the only way to them from Python. Sources are in ``cuda/``.

Imports no package. Functions take numpy arrays or torch CPU tensors, check them, work on their
memory without a copy, and release the GIL. The import chooses the instruction set; another one:
``KVRAG_ISA=scalar|avx2|avx512|avx512vbmi2|avx512bf16|amxbf16|neon`` in the environment. Where
nothing was compiled, or with ``KVRAG_ISA=reference``, PyTorch and numpy compute (`reference.py`).
Begin with `kernels.py`; `gpu/` has the kernels for graphics cards.
"""

from __future__ import annotations

from kvrag.native.attention import (
    ATTENTION_TYPES,
    Buffers,
    Mass,
    Scores,
    attend,
    attend_each,
)
from kvrag.native.entropy import (
    DecodeJob,
    RansModel,
    decode_many,
    decode_rows,
    encode_rows,
    ideal_bits,
)
from kvrag.native.kernels import (
    IS_COMPILED,
    REFERENCE,
    instruction_set,
    instruction_sets,
    use_instruction_set,
)
from kvrag.native.linear import (
    GROUP,
    INT8_PANEL,
    MAX_INT8_INPUTS,
    MAX_ROWS,
    FewRowsLinear,
    GroupedLinear,
    GroupedWeight,
    Int8Linear,
    RowLayers,
)
from kvrag.native.packed import PackedBands, pack_rows, place_packed
from kvrag.native.reconstruction import (
    Patches,
    Points,
    Rotation,
    contexts,
    gated,
    reconstruct,
    refine,
    rms_norm,
    rotate,
)

__all__ = [
    "ATTENTION_TYPES",
    "GROUP",
    "INT8_PANEL",
    "IS_COMPILED",
    "MAX_INT8_INPUTS",
    "MAX_ROWS",
    "REFERENCE",
    "Buffers",
    "DecodeJob",
    "FewRowsLinear",
    "GroupedLinear",
    "GroupedWeight",
    "Int8Linear",
    "Mass",
    "PackedBands",
    "Patches",
    "Points",
    "RansModel",
    "Rotation",
    "RowLayers",
    "Scores",
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
    "pack_rows",
    "place_packed",
    "reconstruct",
    "refine",
    "rms_norm",
    "rotate",
    "use_instruction_set",
]
