"""Documents with questions about them: a file of questions, a folder of pages, or kvrag's own.

A folder needs no questions: its headings and the first sentences under them are asked for.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from kvrag.chunk import Document
from kvrag.errors import DocumentError, ParameterError
from kvrag.ingest.files import find_files
from kvrag.ingest.headings import find_headings
from kvrag.ingest.limits import ParseLimits
from kvrag.ingest.loaders import load_bytes, sought_suffixes
from kvrag.models.kv_model import KVModel
from kvrag.regularfile import read_regular
from kvrag_bench.judge.datasets import read_questions
from kvrag_bench.quality.handbook import handbook_folder

_PAGES = frozenset({".htm", ".html", ".xhtml"})
# "Chapter 6. ", "6.2.1. ", "B.2. " and the like: nobody asks for numbers.
_NUMBER = re.compile(r"^(?:\w+\s)?(?:[A-Z]\.)?[\d.]*\d[.)]?\s+")
_SENTENCE = re.compile(r"[^\W\d_].+?[^\W\d_]{2}[.!?](?=\s|$)", re.DOTALL)
_FEWEST_WORDS, _MOST_WORDS = 12, 60
# A document is a copy if others hold more of its runs of words than this share.
_MOST_COPIED, _RUN = 0.2, 12


@dataclass(frozen=True)
class Case:
    """A question about documents.

    Attributes
    ----------
    question, answers
        The question, and its accepted answers.
    sources
        The documents that it is about.
    """

    question: str
    answers: tuple[str, ...]
    sources: tuple[str, ...]


def read_corpus(data: str, num_questions: int | None = None) -> tuple[list[Document], list[Case]]:
    """Read documents, and questions about them.

    Parameters
    ----------
    data
        A file of questions with their texts (`kvrag_bench.judge.datasets`), each different text a
        document; or a folder of HTML pages or, if it has none, of other files that kvrag reads.
    num_questions
        Of a file, read only this many questions from the start, with their texts; None reads all.

    Raises
    ------
    ParameterError
        When there is no such file or folder, it is of another layout, or it has nothing to ask.
    DocumentError
        When a page is damaged.
    """
    if Path(data).is_dir():
        documents = _pages(Path(data).resolve())
        cases = list(asked_of(documents))
        if not cases:
            raise ParameterError(
                f"{data}: nothing to ask, as none of its documents ({len(documents):,}) has a "
                f"heading and under it a sentence of {_FEWEST_WORDS} to {_MOST_WORDS} words; "
                "expected such pages, or a file of questions"
            )
        return documents, cases
    questions = read_questions(data, num_questions)
    texts = dict.fromkeys(text for one in questions for text in one.texts)
    sources = {text: f"text {number}" for number, text in enumerate(texts)}
    cases = [
        Case(one.question, one.answers, tuple(sources[text] for text in one.texts))
        for one in questions
    ]
    return [Document(source, text) for text, source in sources.items()], cases


def read_handbook() -> tuple[list[Document], list[Case]]:
    """Return the handbook of the examples, with its questions."""
    folder = handbook_folder()
    documents = [Document(page.name, page.read_text("utf-8")) for page in folder.glob("*.md")]
    pages = tuple(one.source for one in documents)
    rows = json.loads((folder.parent / "handbook-questions.json").read_text("utf-8"))
    return documents, [Case(row["question"], tuple(row["answers"]), pages) for row in rows]


def asked_of(documents: Sequence[Document]) -> Iterator[Case]:
    """Yield questions in the documents' own words, whatever their language.

    For each heading that stands only once among all, that is the heading, and for each section the
    beginning of its first sentence. The answer is that sentence, or the rest of it.
    """
    sections = [
        (_NUMBER.sub("", " ".join(title.split())), sentence, document.source)
        for document in documents
        for title, sentence in _sections(document.text)
    ]
    seen = Counter(title for title, _, _ in sections)
    for title, sentence, source in sections:
        if seen[title] == 1 and len(title.split()) > 1:
            yield Case(f"{title.rstrip('?')}?", (sentence,), (source,))
        words = sentence.split()
        half = len(words) // 2
        yield Case(f"{' '.join(words[:half])} ...", (" ".join(words[half:]),), (source,))


def without_copies(documents: Sequence[Document]) -> list[Document]:
    """Return documents without those that repeat earlier ones.

    MuSiQue's texts are windows over longer ones. Nine tenths of each are in another one too, so
    the nearest to a chunk would be the chunk again.
    """
    seen: set[int] = set()
    kept = []
    for document in documents:
        words = document.text.split()
        starts = range(max(1, len(words) - _RUN + 1))
        runs = {hash(" ".join(words[start : start + _RUN])) for start in starts}
        if len(runs & seen) <= _MOST_COPIED * len(runs):
            kept.append(document)
            seen |= runs
    return kept


def _sections(text: str) -> Iterator[tuple[str, str]]:
    """Yield each heading that a paragraph follows, with the paragraph's first sentence."""
    marks = find_headings(text)
    for mark, end in zip(marks, [*(one.start for one in marks[1:]), None], strict=False):
        _, _, body = text[mark.start : end].partition("\n")
        for paragraph in body.split("\n\n"):
            sentence = _SENTENCE.match(paragraph.strip())
            words = sentence[0].split() if sentence else []
            if _FEWEST_WORDS <= len(words) <= _MOST_WORDS:
                yield mark.title, " ".join(words)
                break


def _pages(folder: Path) -> list[Document]:
    """Return the documents of a folder: those of its HTML pages, if it has any."""
    found = find_files(folder, folder, sought_suffixes()).files
    pages = [path for path in found if Path(path).suffix.lower() in _PAGES] or found
    if not pages:
        raise ParameterError(f"{folder}: there is no document in this folder")
    limit = ParseLimits().max_file_bytes
    documents: list[Document] = []
    for path in pages:
        try:
            documents += load_bytes(path, read_regular(Path(path), limit))
        except OSError as error:
            raise DocumentError(f"{path}: cannot be read: {error.strerror}") from error
    # Their places in the folder: results do not depend on where it is.
    places = [str(Path(one.source).relative_to(folder)) for one in documents]
    return [
        Document(place, one.text, one.metadata)
        for place, one in zip(places, documents, strict=True)
    ]


def one_layer(tokenizer: PreTrainedTokenizerBase) -> KVModel:
    """Return a model of one thin layer: an index by a tokenizer, for what KV does not decide."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=8192,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    model.eval()  # type: ignore[no-untyped-call]
    return KVModel(model, tokenizer, name="one layer")
