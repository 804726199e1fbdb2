"""The command line: one file for each command. The rest of kvrag imports nothing from here.

Modules of this layer import torch, the engine and the index only inside the commands, so that
`kvrag --help` stays fast.
"""
