"""Training of link tokens, and of the small model that ships with kvrag.

Imports `kvrag_bench` and everything below it.
Begin with `links/trainer.py`.
"""
