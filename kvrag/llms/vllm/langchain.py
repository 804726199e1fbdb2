"""LangChain language models over vLLM: `KVRagVLLM` and `ChatKVRagVLLM`.

They extend the classes of `kvrag.llms.langchain`; vLLM answers, in this process or as a server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kvrag.engine.answer import Answer
from kvrag.llms.langchain import ChatKVRag, KVRagLLM
from kvrag.llms.vllm.adapter_settings import VLLMSettings

_MAX_THREADS = 64


class KVRagVLLM(VLLMSettings, KVRagLLM):
    """A LangChain LLM that lets vLLM fuse and answer prompts.

    Several prompts in one call form one batch.

    >>> llm = KVRagVLLM(index="my-index", base_url="http://127.0.0.1:8000/v1")  # doctest: +SKIP
    >>> llm.batch(["...", "..."])                                               # doctest: +SKIP
    """

    def answers(self, prompts: Sequence[str], call: Mapping[str, Any]) -> list[Answer]:
        """Return the answers to several prompts, asked at the same time."""
        if len(prompts) < 2:
            return super().answers(prompts, call)
        with ThreadPoolExecutor(min(len(prompts), _MAX_THREADS), "kvrag-ask") as threads:
            return list(threads.map(lambda prompt: self.answer(prompt, call), prompts))


class ChatKVRagVLLM(VLLMSettings, ChatKVRag):
    """A LangChain chat model that lets vLLM fuse and answer conversations."""
