"""The referee: speed, quality and size on equal terms.

Imports `cli`, `kvrag_corpus` and everything below them.
Begin with `ttft.py`; `cli/` has a command for each measurement.
"""
