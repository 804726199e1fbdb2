"""Hugging Face decoders, unmodified, that compute only chosen tokens of a prompt, layer by layer.

Imports `positions`, `weights` and everything below them.
Begin with `kv_model.py`; `families.py` says what runs.
"""
