"""Loading stored KV while other things are computed."""

LOAD_THREADS = 4
"""How many of a prompt's records are read at the same time, by default."""

MAX_LOAD_THREADS = 64
