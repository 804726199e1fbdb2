"""Two retrievers in an ensemble, by meaning and by words, and a reranker over both."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from handbook import ASK, handbook_index
from langchain_classic.retrievers import ContextualCompressionRetriever, EnsembleRetriever
from langchain_core.callbacks import Callbacks
from langchain_core.documents import BaseDocumentCompressor, Document

from kvrag.llms.langchain import ChatKVRag
from kvrag.retrievers.langchain import KVRagEmbeddings, KVRagRetriever, KVRagVectorStore

QUESTION = "Which extension is the help line for computers?"


class BySentence(BaseDocumentCompressor):
    """A small reranker: a passage is as good as its best sentence.

    With a cross-encoder at hand, take `Index.search(reranker=...)` or LangChain's own.
    """

    def compress_documents(
        self,
        documents: Sequence[Document],
        query: str,
        callbacks: Callbacks | None = None,  # noqa: ARG002
    ) -> list[Document]:
        embeddings = KVRagEmbeddings("minilm")
        asked = np.array(embeddings.embed_query(query))

        def score(document: Document) -> float:
            sentences = document.page_content.split(". ")
            return float((np.array(embeddings.embed_documents(sentences)) @ asked).max())

        return sorted(documents, key=score, reverse=True)[:3]


def main() -> None:
    folder = handbook_index()
    ensemble = EnsembleRetriever(
        retrievers=[
            KVRagRetriever(index=folder, k=6),
            KVRagVectorStore(folder).as_retriever(search_kwargs={"k": 6}),
        ]
    )
    best = ContextualCompressionRetriever(base_compressor=BySentence(), base_retriever=ensemble)
    found = best.invoke(QUESTION)
    context = "\n\n".join(document.page_content for document in reversed(found))
    print(QUESTION)
    chat = ChatKVRag(index=folder, max_tokens=40)
    print(chat.invoke(f"{context}\n\n{ASK}\n\nQuestion: {QUESTION}").text)


if __name__ == "__main__":
    main()
