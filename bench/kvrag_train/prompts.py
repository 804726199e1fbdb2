"""The prompt formats that the tiny model is trained and asked in.

Each format splits into a head shared by all questions about the same documents and a tail
for each question, so that one forward can train many questions over one set of documents.
"""

from __future__ import annotations

from dataclasses import dataclass

_RULE = "---------------------"


@dataclass(frozen=True)
class PromptFormat:
    """How documents and a question become a prompt.

    Attributes
    ----------
    name
        Label.
    before_documents
        Text between BOS and the first document.
    after_documents
        Text after the last document, up to the part that differs by question.
    question
        The rest, with ``{question}``.
    """

    name: str
    before_documents: str
    after_documents: str
    question: str

    def render(self, documents: list[str] | tuple[str, ...], question: str) -> str:
        """Return the prompt text, without BOS."""
        return (
            self.before_documents
            + "\n\n".join(documents)
            + self.after_documents
            + self.question.format(question=question)
        )


PLAIN = PromptFormat("plain", "", "\n\nQuestion:", " {question}\nAnswer:")
LLAMAINDEX = PromptFormat(
    "llamaindex",
    f"Context information is below.\n{_RULE}\n",
    f"\n{_RULE}\nGiven the context information and not prior knowledge, answer the query.\nQuery:",
    " {question}\nAnswer: ",
)
LANGCHAIN = PromptFormat(
    "langchain",
    "Use the following pieces of context to answer the question at the end. If you don't know "
    "the answer, just say that you don't know, don't try to make up an answer.\n\n",
    "\n\nQuestion:",
    " {question}\nHelpful Answer:",
)
CHAT_USER = PromptFormat(
    "chat_user",
    "<|user|>\n",
    "\n\nQuestion:",
    " {question}<eos>\n<|assistant|>\n",
)
CHAT_SYSTEM = PromptFormat(
    "chat_system",
    "<|system|>\n",
    "<eos>\n<|user|>\n",
    "{question}<eos>\n<|assistant|>\n",
)

CHAT_LANGCHAIN = PromptFormat(
    "chat_langchain",
    "<|system|>\nUse the following pieces of context to answer the user's question.\nIf you don't "
    "know the answer, just say that you don't know, don't try to make up an answer.\n"
    "----------------\n",
    CHAT_SYSTEM.after_documents,
    CHAT_SYSTEM.question,
)
CHAT_LLAMAINDEX = PromptFormat(
    "chat_llamaindex",
    "<|system|>\nYou are an expert Q&A system that is trusted around the world.\n"
    "Always answer the query using the provided context information, and not prior knowledge.\n"
    "Some rules to follow:\n1. Never directly reference the given context in your answer.\n"
    "2. Avoid statements like 'Based on the context, ...' or 'The context information ...' or "
    f"anything along those lines.<eos>\n<|user|>\n{LLAMAINDEX.before_documents}",
    LLAMAINDEX.after_documents,
    f"{LLAMAINDEX.question}<eos>\n<|assistant|>\n",
)

FORMATS: tuple[PromptFormat, ...] = (
    PLAIN,
    LLAMAINDEX,
    LANGCHAIN,
    CHAT_USER,
    CHAT_SYSTEM,
    CHAT_LANGCHAIN,
    CHAT_LLAMAINDEX,
)
FORMAT_SHARES: tuple[float, ...] = (0.55, 0.08, 0.08, 0.08, 0.07, 0.07, 0.07)
