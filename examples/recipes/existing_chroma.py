"""An existing Chroma collection: kvrag adopts its documents, Chroma goes on searching.

It needs langchain-chroma.
"""

from __future__ import annotations

from handbook import HANDBOOK, handbook_index
from langchain_chroma import Chroma

import kvrag
from kvrag.ingest.adopting import adopted
from kvrag.llms.langchain import ChatKVRag
from kvrag.retrievers.langchain import KVRagEmbeddings

QUESTION = "On which radio channel do we talk when loading and mooring?"


def existing() -> Chroma:
    """Stand for what you have: a collection with one document for each paragraph."""
    paragraphs = [
        one
        for page in ("loading-vehicles.md", "bookings-and-refunds.md")
        for one in (HANDBOOK / page).read_text("utf-8").split("\n\n")
        if len(one) > 80
    ]
    return Chroma.from_texts(paragraphs, KVRagEmbeddings("minilm"), collection_name="pages")


def main() -> None:
    folder, collection = handbook_index(), existing()
    with kvrag.Index.open(folder) as index:
        index.add(adopted(collection))
    found = collection.similarity_search(QUESTION, k=3)
    context = "\n\n".join(document.page_content for document in found)
    answer = ChatKVRag(index=folder, max_tokens=40).invoke(f"{context}\n\nQuestion: {QUESTION}")
    usage = answer.usage_metadata
    print(QUESTION)
    print(answer.text)
    cached = usage["input_token_details"]["cache_read"]
    print(f"  {cached} of {usage['input_tokens']} prompt tokens reused")


if __name__ == "__main__":
    main()
