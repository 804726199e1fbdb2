"""Position encodings: they place position-free keys, and strip positions from placed ones.

Imports `native`.
Begin with `rotary.py`.
"""
