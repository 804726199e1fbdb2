"""Loading stored KV while other things are computed."""

LOAD_THREADS = 4
"""The most records of a prompt that are read at the same time, by default."""

MAX_LOAD_THREADS = 64
