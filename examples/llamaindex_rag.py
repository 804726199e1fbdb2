"""A LlamaIndex query engine that reuses the stored KV of its retrieved nodes.

    python examples/llamaindex_rag.py [MODEL]

The query engine is plain LlamaIndex; only its retriever and its language model come from kvrag.
MODEL is a folder or hub name of a Hugging Face decoder. The default is the small model included in
kvrag, so the example runs offline in seconds.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from llama_index.core import PromptTemplate, Settings
from llama_index.core.query_engine import RetrieverQueryEngine
from transformers.utils import logging

import kvrag
from kvrag.llms.llamaindex import KVRagLLM
from kvrag.retrievers.llamaindex import KVRagRetriever

DOCUMENTS = Path(__file__).parent / "documents"
QUESTION = "Where did Stikidy go to school?"

logging.disable_progress_bar()  # Transformers shows one for each model that it loads


def main(model: str = "kvrag-tiny") -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "index"
        with kvrag.Index.create(path, model=model, chunk_tokens=64) as index:
            index.add([DOCUMENTS])

        # Not used as a chat model: the template below is a prompt to complete.
        llm = KVRagLLM(index=path, max_tokens=24, is_chat_model=False)
        # LlamaIndex cuts nodes that do not fit; let it count tokens as the model does.
        Settings.tokenizer = llm.token_ids
        engine = RetrieverQueryEngine.from_args(
            KVRagRetriever(path, k=4),
            llm=llm,
            text_qa_template=PromptTemplate("{context_str}\n\nQuestion: {query_str}\nAnswer:"),
        )

        response = engine.query(QUESTION)
        print(QUESTION)
        print(str(response).strip())
        for node in response.source_nodes:
            print(f"  from {Path(node.metadata['source']).name}, score {node.score:.2f}")

        # Every answer that comes straight from the model reports what the engine did.
        context = "\n\n".join(node.text for node in response.source_nodes)
        usage = llm.complete(f"{context}\n\nQuestion: {QUESTION}\nAnswer:").raw["usage"]
        print(f"  {usage['cached_tokens']} of {usage['prompt_tokens']} prompt tokens reused")


if __name__ == "__main__":
    main(*sys.argv[1:2])
