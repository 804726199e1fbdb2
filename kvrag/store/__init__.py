"""Where records are kept: files, Redis, buckets, HTTP, tiers, encryption.

Imports no package, only single modules of `kvrag`.
Begin with `base.py`, the protocol, then `file.py`; `registry.py` opens a store by its URL.
What only some stores do is a protocol there, too.
"""
