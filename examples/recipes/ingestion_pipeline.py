"""LlamaIndex's ingestion pipeline into a kvrag index: only what has changed is added again."""

from __future__ import annotations

from handbook import ASK, own_index
from llama_index.core import Document
from llama_index.core.ingestion import DocstoreStrategy, IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.storage.docstore import SimpleDocumentStore

from kvrag.llms.llamaindex import KVRagLLM
from kvrag.retrievers.llamaindex import KVRagRetriever
from kvrag.retrievers.llamaindex_store import KVRagEmbedding, KVRagVectorStore

QUESTION = "What is the name of the ship's cat?"


def main() -> None:
    folder = "notices-index"
    own_index(folder).close()
    pipeline = IngestionPipeline(
        transformations=[SentenceSplitter(chunk_size=256), KVRagEmbedding(folder)],
        docstore=SimpleDocumentStore(),
        docstore_strategy=DocstoreStrategy.UPSERTS,
        vector_store=KVRagVectorStore(folder),
    )
    for cat in ("Pepper", "Saffron"):
        notice = Document(
            text=f"Notice. The ship's cat of the Fair Margit is {cat}. Do not feed {cat} at night.",
            id_="notice",
        )
        print(f"{len(pipeline.run(documents=[notice]))} node written")
        print(f"{len(pipeline.run(documents=[notice]))} nodes written, the same again")
    passages = [node.text for node in KVRagRetriever(folder, k=2).retrieve(QUESTION)]
    prompt = "\n\n".join([*passages, ASK, f"Question: {QUESTION}"])
    print(QUESTION)
    print(KVRagLLM(index=folder, max_tokens=40).complete(prompt).text.strip())
    print(f"  old notice found: {any('Pepper' in one for one in passages)}")


if __name__ == "__main__":
    main()
