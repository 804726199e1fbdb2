"""An existing Chroma collection: kvrag adopts its documents, Chroma goes on searching.

It needs langchain-chroma.
"""

from __future__ import annotations

from handbook import ASK, HANDBOOK, own_index
from langchain_chroma import Chroma

from kvrag.ingest.adopting import adopted
from kvrag.llms.langchain import ChatKVRag
from kvrag.retrievers.langchain import KVRagEmbeddings

QUESTION = "What is the password of the wireless network for the public?"


def existing() -> Chroma:
    """Stand for what you have: a collection with one document for each paragraph."""
    text = (HANDBOOK / "computers.md").read_text("utf-8")
    paragraphs = [one for one in text.split("\n\n") if len(one) > 80]
    return Chroma.from_texts(paragraphs, KVRagEmbeddings("minilm"), collection_name="pages")


def main() -> None:
    collection = existing()
    with own_index("chroma-index") as index:
        index.add(adopted(collection))
    found = collection.similarity_search(QUESTION, k=3)
    context = "\n\n".join(document.page_content for document in found)
    chat = ChatKVRag(index="chroma-index", max_tokens=40)
    answer = chat.invoke(f"{context}\n\n{ASK}\n\nQuestion: {QUESTION}")
    usage = answer.usage_metadata
    print(QUESTION)
    print(answer.text)
    cached = usage["input_token_details"]["cache_read"]
    print(f"  {cached} of {usage['input_tokens']} prompt tokens reused")


if __name__ == "__main__":
    main()
