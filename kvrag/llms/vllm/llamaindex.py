"""The LlamaIndex language model over vLLM: `KVRagVLLM`.

It is that of `kvrag.llms.llamaindex`, answered by a vLLM in this process or behind its server.
"""

from __future__ import annotations

from kvrag.llms.llamaindex import KVRagLLM
from kvrag.llms.vllm.adapter_settings import VLLMSettings


class KVRagVLLM(VLLMSettings, KVRagLLM):
    """A LlamaIndex LLM whose prompts are fused and answered by vLLM.

    >>> llm = KVRagVLLM(index="my-index", base_url="http://127.0.0.1:8000/v1")  # doctest: +SKIP
    """

    @classmethod
    def class_name(cls) -> str:
        return "KVRagVLLM"
