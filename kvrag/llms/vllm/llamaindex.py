"""The LlamaIndex language model over vLLM: `KVRagVLLM`.

It extends the class of `kvrag.llms.llamaindex`; vLLM answers, in this process or as a server.
"""

from __future__ import annotations

from kvrag.llms.llamaindex import KVRagLLM
from kvrag.llms.vllm.engine import VLLMSettings


class KVRagVLLM(VLLMSettings, KVRagLLM):
    """A LlamaIndex LLM that lets vLLM fuse and answer prompts.

    >>> llm = KVRagVLLM(index="my-index", base_url="http://127.0.0.1:8000/v1")  # doctest: +SKIP
    """

    @classmethod
    def class_name(cls) -> str:
        return "KVRagVLLM"
