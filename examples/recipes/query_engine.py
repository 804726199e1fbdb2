"""LlamaIndex's query engine."""

from __future__ import annotations

from pathlib import Path

from handbook import handbook_index
from llama_index.core import Settings
from llama_index.core.query_engine import RetrieverQueryEngine

from kvrag.llms.llamaindex import KVRagLLM
from kvrag.retrievers.llamaindex import KVRagRetriever

QUESTION = "What is the password of the wireless network for the public?"


def main() -> None:
    folder = handbook_index()
    llm = KVRagLLM(index=folder, max_tokens=40)
    # LlamaIndex cuts nodes that do not fit; let it count tokens as the model does.
    Settings.tokenizer = llm.token_ids
    engine = RetrieverQueryEngine.from_args(KVRagRetriever(folder, k=3), llm=llm)
    response = engine.query(QUESTION)
    print(QUESTION)
    print(str(response).strip())
    for node in response.source_nodes:
        print(f"  {Path(node.metadata['source']).name}")


if __name__ == "__main__":
    main()
