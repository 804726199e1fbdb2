"""The command line, one command a file. Nothing here is imported by the rest of kvrag.

Modules of this layer import torch, the engine and the index inside the commands only, so that
`kvrag --help` stays quick.
"""
