"""Layer 3, beside fusion: stored KV that arrives while something else is computed."""

LOAD_THREADS = 4
"""Records of a prompt read at the same time, unless another number is asked for."""

MAX_LOAD_THREADS = 64
