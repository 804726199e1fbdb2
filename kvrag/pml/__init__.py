"""Prompt Markup Language: prompts written as reusable modules (Prompt Cache).

Imports `engine` and everything below it.
Begin with `engine.py`; `parser.py` parses schemas and prompts.
"""
