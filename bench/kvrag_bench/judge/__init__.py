"""Policies compared with full prefill, question by question, over chunks encoded in memory.

Imports `kvrag` below its command line. Begin with `judging.py`.
"""
