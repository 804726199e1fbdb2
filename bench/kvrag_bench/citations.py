"""`kvrag bench citations`: whether an answer's sentences name the passage that they rest on."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvrag.engine.engine import KVEngine
from kvrag.engine.request import Request
from kvrag.ingest.index import Index
from kvrag.models.kv_model import KVModel
from kvrag.server.citing import sentences, supports
from kvrag_bench.quality.handbook import handbook_pages
from kvrag_bench.quality.metrics import substring_match
from kvrag_corpus.real import cut, generate_set

SETS = ("biography:4", "biography:8", "needle:2k", "carried", "bridge", "code")


@dataclass(frozen=True)
class CitationsRow:
    """One set.

    Attributes
    ----------
    set
        Its name.
    num_chunks
        Chunks of a prompt, the mean.
    num_sentences
        Sentences that say the right answer, in the model's answers.
    num_cited
        Those of them that name a passage.
    num_right
        Those of them whose first passage is one that the answer follows from.
    num_others
        Passages that they name besides and that it does not follow from.
    """

    set: str
    num_chunks: float
    num_sentences: int
    num_cited: int
    num_right: int
    num_others: int


def run_citations_bench(
    model: KVModel, sets: Sequence[str], num_questions: int, max_tokens: int, seed: int
) -> Iterator[CitationsRow]:
    """Yield a row for each set: questions of which it is known what their answers follow from.

    Parameters
    ----------
    model
        What answers, by full prefill.
    sets, num_questions, seed
        Names of `kvrag_corpus.real.SETS`, how many questions of each, and where they come from.
    max_tokens
        Tokens of an answer.
    """
    pages = handbook_pages()
    prose = [chunk for page in pages for chunk in cut(page)]
    with (
        tempfile.TemporaryDirectory(prefix="kvrag-bench-") as folder,
        Index.create(Path(folder) / "index", model=model, embedding="hashing") as index,
    ):
        engine = KVEngine(index, max_tokens=max_tokens)
        for name in sets:
            chunks = said = cited = right = others = 0
            asked = generate_set(name, seed, num_questions, prose=prose, pages=pages)
            for one in asked:
                chunks += len(one.chunks)
                content = [*one.chunks, f"Question: {one.question}"]
                turns = [{"role": "user", "content": content}]
                answer = engine.generate(Request(turns, reuse=False)).text
                found = supports(answer, one.chunks, one.question)
                for span in sentences_with(answer, one.answers):
                    named = [each.passage for each in found if each.sentence == span]
                    said += 1
                    cited += bool(named)
                    right += named[:1] != [] and named[0] in one.supporting
                    others += len({*named[1:]} - {*one.supporting})
            mean = chunks / max(1, len(asked))
            yield CitationsRow(name, mean, said, cited, right, others)


def sentences_with(text: str, answers: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Yield where the sentences are that say an accepted answer."""
    for start, end in sentences(text):
        if substring_match(text[start:end], answers):
            yield start, end
