"""Language models for LangChain and LlamaIndex, and the engine over vLLM.

Imports `pml` and everything below it, and the framework.
Begin with `langchain.py`; vLLM is in `vllm/`.
"""
