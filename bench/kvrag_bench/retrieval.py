"""`kvrag bench retrieval`: whether a search finds the chunk that holds the answer."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvrag.chunk import Document
from kvrag.errors import ParameterError
from kvrag.ingest.index import Index
from kvrag.ingest.search import Reranker, SearchHit
from kvrag.ingest.words import asked_words
from kvrag.models.loading import load_tokenizer
from kvrag_bench.corpora import Case, one_layer, read_corpus, read_handbook
from kvrag_corpus.real import generate_set

READABLE = "readable"
_NUM_READABLE = 200
_DEPTH = 10
_TAIL_WORDS = 15


@dataclass(frozen=True)
class RetrievalOptions:
    """What to measure.

    Attributes
    ----------
    data
        Files of questions with their texts, folders of pages (`kvrag_bench.corpora`), and
        "readable": questions over the handbook and over generated lives.
    model
        The model whose tokenizer cuts the chunks. Its weights are not needed: KV decides nothing.
    num_questions
        Of a file, how many of its questions, with their texts; None takes all.
    embedding
        As in `IndexSettings`.
    chunk_tokens
        Lengths of chunks.
    rerank
        Name of a cross-encoder; None leaves it out.
    num_tails
        Of how many chunks, evenly spread, the last 15 words are searched for.
    """

    data: Sequence[str] = (READABLE,)
    num_questions: int | None = None
    model: str = "smollm2-135m"
    embedding: str = "minilm"
    chunk_tokens: Sequence[int] = (128, 256, 512)
    rerank: str | None = None
    num_tails: int = 40


@dataclass(frozen=True)
class RetrievalRow:
    """One way of searching one set.

    Attributes
    ----------
    data, chunk_tokens, way
        The set, the length of its chunks, and the way of searching.
    num_questions, num_chunks
        Questions with an answer in the documents that belong to them, and chunks searched.
    recall_4, recall_10
        Share of the questions with such a chunk among the first 4 and 10.
    mrr
        Mean reciprocal rank of the first such chunk, 0 beyond the tenth.
    tails
        Share of chunks found among the first 4 by their last 15 words.
    """

    data: str
    chunk_tokens: int
    way: str
    num_questions: int
    num_chunks: int
    recall_4: float
    recall_10: float
    mrr: float
    tails: float


def run_retrieval_bench(
    options: RetrievalOptions, on_progress: Callable[[str], None] = lambda _: None
) -> Iterator[RetrievalRow]:
    """Yield a row for each set, length of chunks and way of searching."""
    reranker = None if options.rerank is None else Reranker(options.rerank)
    model = one_layer(load_tokenizer(options.model))
    for data in options.data:
        documents, cases = (
            _readable() if data == READABLE else read_corpus(data, options.num_questions)
        )
        for chunk_tokens in options.chunk_tokens:
            on_progress(f"{Path(data).stem}, chunks of {chunk_tokens} tokens")
            with (
                tempfile.TemporaryDirectory(prefix="kvrag-") as folder,
                Index.create(
                    Path(folder) / "index",
                    model=model,
                    embedding=options.embedding,
                    chunk_tokens=chunk_tokens,
                ) as index,
            ):
                index.add(documents)
                yield from _rows(index, Path(data).stem, cases, reranker, options.num_tails)


def _rows(
    index: Index, data: str, cases: Sequence[Case], reranker: Reranker | None, num_tails: int
) -> Iterator[RetrievalRow]:
    ways: dict[str, Callable[[str, int], list[SearchHit]]] = {
        "dense": index.search_dense,
        "sparse": index.search_words,
        "hybrid": index.search,
    }
    if reranker is not None:
        ways["reranked"] = lambda question, k: index.search(question, k, reranker=reranker)
    asked = [(case.question, wanted) for case in cases if (wanted := _wanted(index, case))]
    if not asked:
        raise ParameterError(f"no question of {data} has its answer in one of its texts")
    sources = [row.source for row in index.documents()]
    chunk_ids = [chunk_id for one in sources for chunk_id in index.catalog.chunk_ids_of(one)]
    tails = index.get_chunks(chunk_ids[:: max(1, len(chunk_ids) // num_tails)][:num_tails])
    for way, search in ways.items():
        ranks = [_rank(search(question, _DEPTH), wanted) for question, wanted in asked]
        found = [
            _rank(search(" ".join(chunk.text.split()[-_TAIL_WORDS:]), 4), {chunk.chunk_id})
            for chunk in tails
        ]
        yield RetrievalRow(
            data=data,
            chunk_tokens=index.config.chunk_tokens,
            way=way,
            num_questions=len(asked),
            num_chunks=len(chunk_ids),
            recall_4=sum(0 < rank <= 4 for rank in ranks) / len(asked),
            recall_10=sum(rank > 0 for rank in ranks) / len(asked),
            mrr=sum(1 / rank for rank in ranks if rank) / len(asked),
            tails=sum(rank > 0 for rank in found) / len(found),
        )


def _rank(hits: Sequence[SearchHit], wanted: set[str]) -> int:
    """Return the rank of the first wanted chunk, 0 if there is none."""
    return next((i for i, hit in enumerate(hits, 1) if hit.chunk.chunk_id in wanted), 0)


def _wanted(index: Index, case: Case) -> set[str]:
    """Return the chunks of a question's own documents that hold one of its answers."""
    ids = [chunk_id for one in case.sources for chunk_id in index.catalog.chunk_ids_of(one)]
    return {
        chunk.chunk_id
        for chunk in index.get_chunks(ids)
        if any(f" {_words(answer)} " in f" {_words(chunk.text)} " for answer in case.answers)
    }


def _words(text: str) -> str:
    return " ".join(asked_words(text))


def _readable() -> tuple[list[Document], list[Case]]:
    """Return the handbook and generated lives, eight to a document, with 200 questions."""
    documents, cases = read_handbook()
    for number, asked in enumerate(
        generate_set("biography:8", 2024, _NUM_READABLE - len(cases), prose=(), pages=())
    ):
        documents.append(Document(f"lives {number}", "\n\n".join(asked.chunks)))
        cases.append(Case(asked.question, asked.answers, (f"lives {number}",)))
    return documents, cases
