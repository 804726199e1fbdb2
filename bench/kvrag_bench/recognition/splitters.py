"""Splitters of LangChain and LlamaIndex, and what prompts do to text: each cuts and alters it."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvrag.errors import ParameterError
from kvrag.ingest.embedding import get_embedding

_SENTENCE_END = re.compile(r"(?<=[.!?])(?=\s)")

Split = Callable[[str], list[str]]
Alter = Callable[[Sequence[str]], str]


def splitters(num_tokens: Callable[[str], list[int]]) -> Iterator[tuple[str, Split]]:
    """Yield the name of each splitter, and a function that splits a document.

    Parameters
    ----------
    num_tokens
        Returns a text's token ids; LlamaIndex counts them.

    Raises
    ------
    ParameterError
        If a framework is not installed.
    """
    try:
        from langchain_text_splitters import (
            MarkdownHeaderTextSplitter,
            RecursiveCharacterTextSplitter,
        )
        from llama_index.core import Document
        from llama_index.core.node_parser import SemanticSplitterNodeParser, SentenceSplitter
    except ImportError as error:
        raise ParameterError(
            f"the splitters of other frameworks: {error}; install langchain-text-splitters and "
            "llama-index-core"
        ) from error
    for size in (500, 1000, 2000):
        for overlap in (0, 200):
            recursive = RecursiveCharacterTextSplitter(chunk_size=size, chunk_overlap=overlap)
            yield f"RecursiveCharacter {size:,}/{overlap}", recursive.split_text
    # Not NLTK's sentences, whose data may be missing.
    sentences = SentenceSplitter(
        chunk_size=256, chunk_overlap=0, tokenizer=num_tokens, chunking_tokenizer_fn=_sentences
    )
    yield "SentenceSplitter 256", sentences.split_text
    semantic = SemanticSplitterNodeParser(embed_model=_embedding(), sentence_splitter=_sentences)

    def by_meaning(text: str) -> list[str]:
        nodes = semantic.get_nodes_from_documents([Document(text=text)])
        return [node.get_content() for node in nodes]

    yield "SemanticSplitter", by_meaning
    headings = [("#" * level, f"h{level}") for level in (1, 2, 3)]
    markdown = MarkdownHeaderTextSplitter(headings)
    yield (
        "MarkdownHeader",
        lambda text: [one.page_content for one in markdown.split_text(text)],
    )


ALTERED: dict[str, Alter] = {
    "as JSON": lambda pieces: json.dumps([{"text": one} for one in pieces], indent=1),
    "as JSON, Unicode kept": lambda pieces: json.dumps(list(pieces), ensure_ascii=False),
    "quoted, > before each line": lambda pieces: _before_lines(pieces, "> "),
    "indented, as a list's items": lambda pieces: _before_lines(pieces, "  ", "- "),
    "lines joined": lambda pieces: "\n\n".join(" ".join(one.split()) for one in pieces),
    "line ends as CR LF": lambda pieces: "\n\n".join(pieces).replace("\n", "\r\n"),
    "HTML, escaped": lambda pieces: _escaped_html(pieces),
    "Unicode decomposed (NFD)": lambda pieces: unicodedata.normalize("NFD", "\n\n".join(pieces)),
}
"""What a prompt does to the texts of chunks, by name."""


def _before_lines(pieces: Sequence[str], before: str, first: str | None = None) -> str:
    found = []
    for piece in pieces:
        lines = piece.split("\n")
        begin = before if first is None else first
        found.append("\n".join([begin + lines[0], *(before + line for line in lines[1:])]))
    return "\n\n".join(found)


def _escaped_html(pieces: Sequence[str]) -> str:
    import html

    return "\n".join(f"<p>{html.escape(one)}</p>" for one in pieces)


def _sentences(text: str) -> list[str]:
    return _SENTENCE_END.split(text)


def _embedding() -> Any:
    from llama_index.core.embeddings import BaseEmbedding

    hashing = get_embedding("hashing")

    class Hashing(BaseEmbedding):
        """The index's own hashing embedding, so that nothing has to be loaded."""

        def _get_text_embedding(self, text: str) -> list[float]:
            return [float(one) for one in hashing.embed([text])[0]]

        def _get_query_embedding(self, query: str) -> list[float]:
            return self._get_text_embedding(query)

        async def _aget_query_embedding(self, query: str) -> list[float]:
            return self._get_text_embedding(query)

    return Hashing()
