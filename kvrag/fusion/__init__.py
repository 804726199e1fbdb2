"""Stored KV into a prompt: what is reused, what is recomputed, and the pass that does both.

Imports `loading`, `eviction` and everything below them.
Begin with `plan.py`, which decides everything, then `fuser.py`, which carries it out.
"""
