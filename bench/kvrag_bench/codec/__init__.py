"""`kvrag bench codec`: what every codec takes and loses, how fast it is, and against what.

`run.py` calls all parts in order: `presets.py` (codecs with names), `designs.py` (one stage
exchanged), `speed.py` (the entropy coder alone), `decoding.py` (a whole context, against prefill).
"""
