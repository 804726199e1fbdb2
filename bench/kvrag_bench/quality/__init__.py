"""Every policy and codec against full prefill, question by question: `kvrag bench quality`.

Begin with `contest.py`, the run. Questions and their judging are those of `kvrag.tune`.
"""
