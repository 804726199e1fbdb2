"""A LangChain chain with unpatched vLLM, which reuses the stored KV of the retrieved documents.

    python examples/vllm_rag.py [MODEL]

It needs vLLM (docs/vllm.md explains how to install it, also without a GPU). MODEL is a folder or
hub name of a Hugging Face decoder. The default is the small model included in kvrag.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from langchain_core.documents import Document
from langchain_core.prompts import PromptTemplate
from langchain_core.runnables import RunnablePassthrough

import kvrag
from kvrag.llms.vllm.langchain import KVRagVLLM
from kvrag.retrievers.langchain import KVRagRetriever

DOCUMENTS = Path(__file__).parent / "documents"
QUESTIONS = ["Where did Stikidy go to school?", "Who does Binov work for?"]

# vLLM's CPU build needs the size of its cache, in GiB.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")


def join(documents: list[Document]) -> str:
    # Without this, the prompt would contain the documents' repr instead of the chunks' text.
    return "\n\n".join(document.page_content for document in documents)


def main(model: str = "kvrag-tiny") -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "index"
        with kvrag.Index.create(path, model=model, chunk_tokens=64) as index:
            index.add([DOCUMENTS])

        # With base_url="http://127.0.0.1:8000/v1", the server of `kvrag serve --engine vllm` does.
        llm = KVRagVLLM(index=path, max_tokens=24, engine_args={"enforce_eager": True})
        prompt = {
            "context": KVRagRetriever(index=path, k=4) | join,
            "question": RunnablePassthrough(),
        } | PromptTemplate.from_template("{context}\n\nQuestion: {question}\nAnswer:")

        # One batch: vLLM fuses and answers the prompts together.
        result = llm.generate_prompt([prompt.invoke(question) for question in QUESTIONS])
        for question, (generation,) in zip(QUESTIONS, result.generations, strict=True):
            report = (generation.generation_info or {})["report"]
            print(question + generation.text)
            print(
                f"  {report['num_cached']} of {report['num_tokens']} prompt tokens reused, "
                f"{report['num_recomputed']} recomputed"
            )


if __name__ == "__main__":
    main(*sys.argv[1:2])
