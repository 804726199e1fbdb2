"""A LangChain chain that reuses the stored KV of its retrieved documents.

    python examples/langchain_rag.py [MODEL]

The chain is plain LangChain; only its retriever and its language model come from kvrag. MODEL is
a folder or hub name of a Hugging Face decoder. The default is the small model included in kvrag,
so the example runs offline in seconds.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from langchain_core.documents import Document
from langchain_core.prompts import PromptTemplate
from langchain_core.runnables import RunnablePassthrough
from transformers.utils import logging

import kvrag
from kvrag.llms.langchain import KVRagLLM
from kvrag.retrievers.langchain import KVRagRetriever

DOCUMENTS = Path(__file__).parent / "documents"
QUESTION = "Where did Stikidy go to school?"

logging.disable_progress_bar()  # Transformers shows one for each model that it loads


def join(documents: list[Document]) -> str:
    # Without this, the prompt would contain the documents' repr instead of the chunks' text.
    return "\n\n".join(document.page_content for document in documents)


def main(model: str = "kvrag-tiny") -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "index"
        with kvrag.Index.create(path, model=model, chunk_tokens=64) as index:
            index.add([DOCUMENTS])

        llm = KVRagLLM(index=path, max_tokens=24)
        prompt = {
            "context": KVRagRetriever(index=path, k=4) | join,
            "question": RunnablePassthrough(),
        } | PromptTemplate.from_template("{context}\n\nQuestion: {question}\nAnswer:")
        chain = prompt | llm

        print(QUESTION, end="")
        for piece in chain.stream(QUESTION):
            print(piece, end="", flush=True)
        print()

        # Every answer reports what the engine did.
        result = llm.generate_prompt([prompt.invoke(QUESTION)])
        details = result.generations[0][0].generation_info or {}
        for source in details["sources"]:
            print(f"  from {Path(source['source']).name}, chunk {source['ordinal']}")
        usage = (result.llm_output or {})["token_usage"]
        print(f"  {usage['cached_tokens']} of {usage['prompt_tokens']} prompt tokens reused")


if __name__ == "__main__":
    main(*sys.argv[1:2])
