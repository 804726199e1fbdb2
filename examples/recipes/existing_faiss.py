"""An existing FAISS index and its texts: kvrag adopts the texts, FAISS goes on searching."""

from __future__ import annotations

import faiss
import numpy as np
from handbook import ASK, HANDBOOK, own_index

import kvrag
from kvrag.retrievers.langchain import KVRagEmbeddings

QUESTION = "How many passengers does the Fair Margit carry?"


def existing() -> tuple[faiss.Index, list[str], KVRagEmbeddings]:
    """Stand for what you have: one vector for each paragraph, whatever made it."""
    embeddings = KVRagEmbeddings("minilm")
    text = (HANDBOOK / "fleet.md").read_text("utf-8")
    texts = [one for one in text.split("\n\n") if len(one) > 80]
    vectors = np.array(embeddings.embed_documents(texts), np.float32)
    index = faiss.IndexFlatIP(vectors.shape[1])
    index.add(vectors)
    return index, texts, embeddings


def main() -> None:
    vectors, texts, embeddings = existing()
    with own_index("faiss-index") as index:
        index.add([kvrag.Document(f"faiss-{n}", text) for n, text in enumerate(texts)])
        asked = np.array([embeddings.embed_query(QUESTION)], np.float32)
        found = vectors.search(asked, 3)[1][0]
        prompt = "\n\n".join([*(texts[number] for number in found), ASK, f"Question: {QUESTION}"])
        answer = kvrag.KVEngine(index).generate(
            [{"role": "user", "content": prompt}], max_tokens=40
        )
    print(QUESTION)
    print(answer.text)
    print(f"  {answer.usage.cached_tokens} of {answer.usage.prompt_tokens} prompt tokens reused")


if __name__ == "__main__":
    main()
