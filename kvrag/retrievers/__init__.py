"""Retrievers and vector stores for the frameworks."""
