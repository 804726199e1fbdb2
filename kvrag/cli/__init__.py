"""The command line: a file for each command or two.

Imports `server`, `tune` and everything below; nothing imports it. Torch, the engine and the index
are imported only inside commands, so that `kvrag --help` stays fast.
Begin with `main.py`, which lists the commands, then `query.py`.
"""
