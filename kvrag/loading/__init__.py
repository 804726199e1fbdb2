"""Layer 3, beside fusion: stored KV that arrives while something else is computed."""
