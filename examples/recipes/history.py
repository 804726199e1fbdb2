"""A chat with history: each question is made independent of the chat before it is searched for."""

from __future__ import annotations

from handbook import ASK, handbook_index
from langchain_classic.chains import create_history_aware_retriever, create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder

from kvrag.llms.langchain import ChatKVRag
from kvrag.retrievers.langchain import KVRagRetriever

QUESTIONS = ("What is the name of the workboat?", "How many passengers does the Fair Margit carry?")


def main() -> None:
    folder = handbook_index()
    chat = ChatKVRag(index=folder, max_tokens=40)
    history = MessagesPlaceholder("chat_history")
    alone = ChatPromptTemplate.from_messages(
        [history, ("user", "Write this question so that it can be understood alone: {input}")]
    )
    answer = ChatPromptTemplate.from_messages(
        [history, ("user", f"{{context}}\n\n{ASK}\n\nQuestion: {{input}}")]
    )
    retriever = KVRagRetriever(index=folder, k=3)
    chain = create_retrieval_chain(
        create_history_aware_retriever(chat, retriever, alone),
        create_stuff_documents_chain(chat, answer),
    )
    said: list[BaseMessage] = []
    for question in QUESTIONS:
        result = chain.invoke({"input": question, "chat_history": said})
        said += [HumanMessage(question), AIMessage(result["answer"])]
        print(f"{question}\n{result['answer']}\n")


if __name__ == "__main__":
    main()
