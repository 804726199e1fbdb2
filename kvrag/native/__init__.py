"""The compiled kernels, and the only way to them from Python. Sources are in ``cuda/``.

Imports no package. Functions take numpy arrays or torch CPU tensors, check them, work on their
memory without a copy, and release the GIL. The import chooses the instruction set; another one:
``KVRAG_ISA=scalar|avx2|avx512|avx512vbmi2|avx512bf16|amxbf16|neon`` in the environment. Where
nothing was compiled, or with ``KVRAG_ISA=reference``, PyTorch and numpy compute (`reference.py`).
Begin with `kernels.py`; `gpu/` has the kernels for graphics cards.
"""
