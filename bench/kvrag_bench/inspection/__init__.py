"""What reuse does to one prompt: KV deviation, the tokens policies pick, attention, deltas.

Begin with `measure.py`; `picture.py` draws it. `eviction.py` has the same for eviction.
"""
