"""LangChain's stuff chain: all retrieved documents in one prompt, with citations."""

from __future__ import annotations

from handbook import ASK, handbook_index
from langchain_classic.chains import create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.prompts import ChatPromptTemplate

from kvrag.llms.langchain import ChatKVRag
from kvrag.retrievers.langchain import KVRagRetriever

QUESTION = "What is the name of the workboat?"


def main() -> None:
    folder = handbook_index()
    prompt = ChatPromptTemplate.from_template(f"{{context}}\n\n{ASK}\n\nQuestion: {{input}}")
    chat = ChatKVRag(index=folder, max_tokens=40)
    chain = create_retrieval_chain(
        KVRagRetriever(index=folder, k=3), create_stuff_documents_chain(chat, prompt)
    )
    result = chain.invoke({"input": QUESTION})
    print(QUESTION)
    print(result["answer"])
    for document in result["context"]:
        print(f"  {document.metadata['source'].rpartition('/')[2]}")


if __name__ == "__main__":
    main()
