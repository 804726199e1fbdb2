"""Models by one word: GGUF files from packages, Ollama, llama.cpp or a path, converted once.

Imports `native`, and single modules of `kvrag`.
Begin with `sources.py`, which finds a file, then `convert.py` and `packing.py`.
"""
