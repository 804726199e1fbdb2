"""Reading stored KV while layers are computed, and what loading costs.

Imports `codec`, `store` and everything below them.
Begin with `prefetch.py`.
"""

LOAD_THREADS = 4
"""The most records of a prompt that are read at the same time, by default."""

MAX_LOAD_THREADS = 64
