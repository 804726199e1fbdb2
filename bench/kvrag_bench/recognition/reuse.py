"""How much of prompts is reused, if other splitters cut the documents, or prompts alter them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvrag.chunk import Chunk, ChunkKey, Document
from kvrag.errors import ParameterError
from kvrag.fusion.layout import Layout, lay_out
from kvrag.fusion.segments import ChunkMatcher
from kvrag.ingest.catalog import Catalog
from kvrag.ingest.chunker import chunk_document
from kvrag.ingest.run_finder import RunFinder
from kvrag.ingest.schema import Change, ChunkRow
from kvrag.models.loading import load_tokenizer, shared_prefix_ids
from kvrag.models.references import resolve_model
from kvrag.models.tokens import encode
from kvrag_bench.recognition.splitters import ALTERED, splitters

PIECES = 6
INTRODUCTION = "Use the following pieces of context to answer the question at the end.\n\n"
QUESTION = "\n\nQuestion: What does it cost, and who decides?\nAnswer:"


@dataclass(frozen=True)
class ReuseRow:
    """Prompts of one kind.

    Attributes
    ----------
    name
        The splitter, or what was done to the text.
    num_prompts, num_tokens
        The prompts, and their tokens between introduction and question: text of the index.
    whole
        Share of those tokens that are reused if only whole chunks and their beginnings are found.
    runs
        The same with runs inside chunks.
    num_spans
        Stretches that are reused, in all prompts.
    """

    name: str
    num_prompts: int
    num_tokens: int
    whole: float
    runs: float
    num_spans: int


class Recogniser:
    """An index's recognition of prompts, without any KV.

    Parameters
    ----------
    folder
        Where to write the catalog.
    model
        Whose tokenizer to use.
    documents
        The documents' texts.
    chunk_tokens
        The largest number of tokens in a chunk.
    """

    def __init__(
        self, folder: Path, model: str, documents: Sequence[str], chunk_tokens: int
    ) -> None:
        self.tokenizer = load_tokenizer(resolve_model(model))
        self._prefix_ids = shared_prefix_ids(self.tokenizer)
        self._matcher = ChunkMatcher()
        self._chunks: dict[str, Chunk] = {}
        self._catalog = Catalog.create(folder / "catalog.sqlite")
        vector = np.zeros(1, np.float32)
        for number, text in enumerate(documents):
            source = f"document-{number}"
            chunks = chunk_document(Document(source, text), self.tokenizer, chunk_tokens)
            rows = [ChunkRow(one, [ChunkKey(one.chunk_id)], vector) for one in chunks]
            self._catalog.write(Change(put=[(source, None, "0" * 40, {}, rows)]))
            for chunk in chunks:
                self._matcher.add(chunk.chunk_id, chunk.text)
                self._chunks[chunk.chunk_id] = chunk
        self._finder = RunFinder(self._catalog, lambda ids: str(self.tokenizer.decode(ids)))

    def close(self) -> None:
        """Close the catalog."""
        self._catalog.close()

    def lay_out(self, prompt: str) -> tuple[Layout, Layout]:
        """Return a prompt's layout with whole chunks only, and with runs."""
        (tokens,) = encode(self.tokenizer, [prompt], True)
        whole = lay_out(tokens, self._matcher.find(prompt), self._chunks, self._prefix_ids)
        return whole, self._finder.fill(whole, self._chunks).layout

    @property
    def chunk_texts(self) -> list[str]:
        """The texts of all chunks, in order."""
        return [chunk.text for chunk in self._chunks.values()]

    def num_tokens(self, text: str) -> int:
        """Return the number of tokens of a text."""
        return len(encode(self.tokenizer, [text], False)[0].token_ids)


def measure_reuse(
    folder: Path,
    model: str,
    documents: Sequence[str],
    chunk_tokens: int,
    on_progress: Callable[[str], None],
) -> Iterator[ReuseRow]:
    """Yield a row for each splitter, and for each change that prompts make to text.

    Raises
    ------
    ParameterError
        If there is no document, or a framework is not installed.
    """
    if not documents:
        raise ParameterError("no documents: expected at least one text file")
    with closing(Recogniser(folder, model, documents, chunk_tokens)) as recogniser:

        def num_tokens(text: str) -> list[int]:
            return list(encode(recogniser.tokenizer, [text], False)[0].token_ids)

        for name, split in splitters(num_tokens):
            on_progress(name)
            prompts = ["\n\n".join(pieces) for pieces in _drawn(documents, split)]
            yield _row(recogniser, name, prompts)
        own = _groups(recogniser.chunk_texts)
        for name, alter in ALTERED.items():
            on_progress(name)
            yield _row(recogniser, name, [alter(pieces) for pieces in own])


def _drawn(documents: Sequence[str], split: Callable[[str], list[str]]) -> list[list[str]]:
    """Return the pieces of each prompt: those of all documents, shuffled as a retriever would."""
    pieces = [piece for document in documents for piece in split(document)]
    random.Random(0).shuffle(pieces)
    return _groups(pieces)


def _groups(pieces: Sequence[str]) -> list[list[str]]:
    return [list(pieces[first : first + PIECES]) for first in range(0, len(pieces), PIECES)]


def _row(recogniser: Recogniser, name: str, contexts: Sequence[str]) -> ReuseRow:
    num_tokens = num_whole = num_runs = num_spans = 0
    for context in contexts:
        whole, runs = recogniser.lay_out(INTRODUCTION + context + QUESTION)
        num_tokens += recogniser.num_tokens(context)
        num_whole += whole.num_reused
        num_runs += runs.num_reused
        num_spans += len(runs.spans)
    return ReuseRow(
        name, len(contexts), num_tokens, num_whole / num_tokens, num_runs / num_tokens, num_spans
    )
