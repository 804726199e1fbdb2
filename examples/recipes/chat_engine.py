"""LlamaIndex's chat engine: passages and the chat so far in one prompt."""

from __future__ import annotations

from handbook import handbook_index
from llama_index.core import Settings
from llama_index.core.chat_engine import ContextChatEngine

from kvrag.llms.llamaindex import KVRagLLM
from kvrag.retrievers.llamaindex import KVRagRetriever

QUESTIONS = (
    "What is the password of the wireless network for the public?",
    "Is that network fast?",
)


def main() -> None:
    folder = handbook_index()
    llm = KVRagLLM(index=folder, max_tokens=40)
    Settings.tokenizer = llm.token_ids
    engine = ContextChatEngine.from_defaults(KVRagRetriever(folder, k=2), llm=llm)
    for question in QUESTIONS:
        print(f"{question}\n{str(engine.chat(question)).strip()}\n")


if __name__ == "__main__":
    main()
