"""LangChain language models over vLLM: `KVRagVLLM` and `ChatKVRagVLLM`.

They extend the classes of `kvrag.llms.langchain`; vLLM answers, in this process or as a server.
"""

from __future__ import annotations

from kvrag.llms.langchain import ChatKVRag, KVRagLLM
from kvrag.llms.vllm.engine import VLLMSettings


class KVRagVLLM(VLLMSettings, KVRagLLM):  # type: ignore[misc]  # names of parameters
    """A LangChain LLM that lets vLLM fuse and answer prompts.

    Several prompts in one call form one batch.

    >>> llm = KVRagVLLM(index="my-index", base_url="http://127.0.0.1:8000/v1")  # doctest: +SKIP
    >>> llm.batch(["...", "..."])                                               # doctest: +SKIP
    """


class ChatKVRagVLLM(VLLMSettings, ChatKVRag):  # type: ignore[misc]  # the same
    """A LangChain chat model that lets vLLM fuse and answer conversations."""
