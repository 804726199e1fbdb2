"""Measurements of a model, an index and its stores: `kvrag calibrate` and `kvrag choose-store`.

Imports `engine` and everything below it.
Begin with `calibrate.py`, which measures policies, and `stores.py`, which times stores.
"""
