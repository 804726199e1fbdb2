"""The suite ``retrieved``: a corpus is indexed, and each question finds its chunks in it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from random import Random
from typing import Any

from transformers import PreTrainedTokenizerBase

from kvrag.chunk import Chunk, Document, content_hash
from kvrag.engine.asking import reading_order
from kvrag.errors import ParameterError
from kvrag.ingest.contexts import NO_CONTEXT, SIMILAR, parse_context
from kvrag.ingest.index import Index
from kvrag.models.kv_model import KVModel
from kvrag.models.loading import load_tokenizer
from kvrag_bench.corpora import one_layer, read_corpus, read_handbook, without_copies
from kvrag_bench.judge.questions import JudgedQuestion

RETRIEVED = "retrieved"


@dataclass(frozen=True)
class Found:
    """What an index holds of use to judging.

    Attributes
    ----------
    questions
        Each question once for each number of chunks, next to each other.
    similar
        For each chunk's text the tokens before it with context ``similar``, as ingestion chooses
        them; empty if nobody asked for it.
    """

    questions: tuple[JudgedQuestion, ...]
    similar: dict[str, tuple[int, ...]] = field(default_factory=dict)


@lru_cache(maxsize=1)
def retrieve(
    data: str | None,
    model: str | KVModel,
    tops: tuple[int, ...],
    chunk_tokens: int,
    contexts: tuple[str, ...] = (NO_CONTEXT,),
    *,
    seed: int = 2024,
    num_questions: int = 50,
    beside: Path | None = None,
) -> Found:
    """Index a corpus, and search it for the chunks of questions as ``kvrag query`` does.

    Parameters
    ----------
    data
        The corpus (`read_corpus`), without its copies (`without_copies`); None is the handbook of
        the examples.
    model
        Its tokenizer cuts the chunks.
    tops
        Numbers of chunks that a question gets.
    chunk_tokens
        Largest number of tokens in a chunk.
    contexts
        What chunks will be encoded after (`kvrag.ingest.contexts.parse_context`).
    seed, num_questions
        Which questions are drawn, and how many; more questions begin with the same ones.
    beside
        Keep the index in a folder beside this file, and find it there again; None keeps none.

    Raises
    ------
    ParameterError, DocumentError
        When the corpus cannot be read, or a number is out of range.
    """
    if not tops or min(tops) < 1:
        raise ParameterError(f"top {', '.join(map(str, tops)) or 'empty'}: expected numbers from 1")
    if num_questions < 1:
        raise ParameterError(f"{num_questions} questions: expected at least 1")
    documents, cases = read_handbook() if data is None else read_corpus(data)
    documents = without_copies(documents)
    drawn = Random(seed).sample(cases, len(cases))[:num_questions]
    parsed = [parse_context(one) for one in contexts]
    num_similar = max((one.num_tokens for one in parsed if one.name == SIMILAR), default=0)
    tokenizer = model.tokenizer if isinstance(model, KVModel) else load_tokenizer(model)
    settings = {"chunk_tokens": chunk_tokens, "context": NO_CONTEXT}
    with ExitStack() as stack:
        index = stack.enter_context(_indexed(documents, one_layer(tokenizer), settings, beside))
        others = index
        if num_similar:
            settings["context"] = f"{SIMILAR}:{num_similar}"
            others = stack.enter_context(
                _indexed(documents, one_layer(tokenizer), settings, beside)
            )

        @cache
        def chunks_of(source: str) -> list[Chunk]:
            return index.get_chunks(index.catalog.chunk_ids_of(source))

        def before(chunk: Chunk) -> tuple[str, ...]:
            if not any(one.is_of_document for one in parsed):
                return ()
            return tuple(one.text for one in chunks_of(chunk.source)[: chunk.ordinal])

        name = "the handbook" if data is None else Path(data).name
        questions = []
        similar: dict[str, tuple[int, ...]] = {}
        for number, case in enumerate(drawn):
            hits = [hit.chunk for hit in index.search(case.question, max(tops))]
            for top in dict.fromkeys(tops):
                chunks = reading_order(hits[:top])
                questions.append(
                    JudgedQuestion(
                        place=f"{name}, question {number}, top {top}",
                        type=f"top {top}",
                        question=case.question,
                        answers=case.answers,
                        texts=tuple(chunk.text for chunk in chunks),
                        before=tuple(map(before, chunks)),
                    )
                )
            if num_similar:
                for chunk in others.get_chunks([one.chunk_id for one in hits]):
                    similar[chunk.text] = chunk.contexts[0]
        return Found(tuple(questions), similar)


def similar_to(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, num_tokens: int
) -> dict[str, tuple[int, ...]]:
    """Return the tokens that ingestion with context ``similar`` puts before each of some texts."""
    documents = [Document(f"{number}", text, is_whole=True) for number, text in enumerate(texts)]
    settings = {"context": f"{SIMILAR}:{num_tokens}"}
    with _indexed(documents, one_layer(tokenizer), settings, None) as index:
        ids = [i for one in documents for i in index.catalog.chunk_ids_of(one.source)]
        return {chunk.text: chunk.contexts[0] for chunk in index.get_chunks(ids)}


@contextmanager
def _indexed(
    documents: Sequence[Document], model: KVModel, settings: Mapping[str, Any], beside: Path | None
) -> Iterator[Index]:
    """Open the index of some documents; make it if there is none."""
    with ExitStack() as stack:
        if beside is None:
            place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvrag-")), "index")
        else:
            texts = [[one.source, one.text] for one in documents]
            about = json.dumps([texts, settings, model.tokenizer_fingerprint], sort_keys=True)
            place = beside.with_name(f"{beside.name}.{content_hash(about)[:8]}.index")
        if place.exists():
            index = stack.enter_context(Index.open(place, model=model))
        else:
            index = stack.enter_context(Index.create(place, model=model, **settings))
        # Else it is whole: several processes may read it, and only one may write.
        if len(index.documents()) < len(documents):
            for failed in index.add(documents).failed:
                raise ParameterError(f"{failed.source} cannot be indexed: {failed.reason}")
        yield index
