"""KV to bytes and back: transform, quantising, entropy coding, the record (docs/format.md).

Imports `positions` and everything below it.
Begin with `base.py`, the protocol, then `pipeline.py`, the codec in stages.
"""
