"""A KV cache that forgets keys while it answers.

Imports `models` and everything below it.
Begin with `base.py`, then `corm.py`, a policy; `cache.py` applies it in Transformers.
"""

NO_EVICTION = "none"
"""The name for the full cache, among the names of policies."""
