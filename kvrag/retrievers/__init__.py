"""Retrievers and vector stores for LangChain and LlamaIndex."""
