"""Retrievers and vector stores for LangChain and LlamaIndex.

Imports `engine` and everything below it, and the framework.
Begin with `langchain.py`.
"""
