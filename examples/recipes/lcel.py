"""LangChain's expression language: a chain that streams, and what it reused."""

from __future__ import annotations

from handbook import handbook_index
from langchain_core.documents import Document
from langchain_core.messages import AIMessageChunk
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough

from kvrag.llms.langchain import ChatKVRag
from kvrag.retrievers.langchain import KVRagRetriever

QUESTION = "How many passengers does the Fair Margit carry?"


def join(documents: list[Document]) -> str:
    return "\n\n".join(document.page_content for document in documents)


def main() -> None:
    folder = handbook_index()
    chain = (
        {
            "context": KVRagRetriever(index=folder, k=3) | join,
            "question": RunnablePassthrough(),
        }
        | ChatPromptTemplate.from_template("{context}\n\nQuestion: {question}")
        | ChatKVRag(index=folder, max_tokens=40)
    )
    print(QUESTION)
    whole: AIMessageChunk | None = None
    for piece in chain.stream(QUESTION):
        print(piece.content, end="", flush=True)
        whole = piece if whole is None else whole + piece
    usage = whole.usage_metadata
    cached = usage["input_token_details"]["cache_read"]
    print(f"\n  {cached} of {usage['input_tokens']} prompt tokens reused")


if __name__ == "__main__":
    main()
