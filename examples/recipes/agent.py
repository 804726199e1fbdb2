"""An agent with a retriever tool.

A model of this size decides badly, so the first answer is a forced call of the tool. The second is
free: it answers from what the tool has found.
"""

from __future__ import annotations

from handbook import handbook_index
from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, ModelResponse, wrap_model_call
from langchain_core.messages import ToolMessage
from langchain_core.tools import tool

from kvrag.llms.langchain import ChatKVRag
from kvrag.retrievers.langchain import KVRagRetriever

QUESTION = "What is the password of the wireless network for the public?"


@wrap_model_call
def search_first(request: ModelRequest, handler) -> ModelResponse:  # type: ignore[no-untyped-def]
    is_found = isinstance(request.messages[-1], ToolMessage)
    return handler(request.override(tool_choice="none" if is_found else "search"))


def main() -> None:
    folder = handbook_index()
    retriever = KVRagRetriever(index=folder, k=2)

    @tool
    def search(question: str) -> str:
        """Search the firm's handbook for the answer to a question."""
        return "\n\n".join(one.page_content for one in retriever.invoke(question))

    chat = ChatKVRag(index=folder, max_tokens=60)
    agent = create_agent(chat, [search], middleware=[search_first])
    for message in agent.invoke({"messages": [("user", QUESTION)]})["messages"]:
        calls = getattr(message, "tool_calls", [])
        said = message.text if not isinstance(message, ToolMessage) else message.text[:80] + " ..."
        print(f"{message.type}: {said or calls[0]['args']}".replace("\n", " "))


if __name__ == "__main__":
    main()
