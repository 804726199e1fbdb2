"""Answering: a prompt in, an `Answer` out.

Imports `ingest` and everything below it.
Begin with `engine.py`, which calls the steps of an answer in order.
"""
