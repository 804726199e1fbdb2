"""A LlamaIndex query engine whose retrieved nodes cost nothing to read again.

    python examples/llamaindex_rag.py [MODEL]

The query engine is LlamaIndex's own; only its retriever and its language model come from kvrag.
MODEL is a folder or hub name of a Hugging Face decoder; by default the small model that comes
with kvrag, so that this runs offline in seconds.
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

logging.disable_progress_bar()  # Transformers' own, for each model it loads


def main(model: str = "kvrag-tiny") -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "index"
        with kvrag.Index.create(path, model=model, chunk_tokens=64) as index:
            index.add([DOCUMENTS])

        # Not a chat model here: the template below is a prompt to be completed.
        llm = KVRagLLM(index=path, max_tokens=24, is_chat_model=False)
        # LlamaIndex cuts nodes that do not fit; let it count as the model does.
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

        # Every answer of the model itself says what the engine did.
        context = "\n\n".join(node.text for node in response.source_nodes)
        usage = llm.complete(f"{context}\n\nQuestion: {QUESTION}\nAnswer:").raw["usage"]
        print(f"  {usage['cached_tokens']} of {usage['prompt_tokens']} prompt tokens reused")


if __name__ == "__main__":
    main(*sys.argv[1:2])
