"""Which sentences of an answer rest on which passages, and their citations."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import PurePath

import regex

from kvrag.chunk import Chunk
from kvrag.engine.answer import Answer, Source
from kvrag.ingest.index import Index
from kvrag.ingest.schema import DocumentRow
from kvrag.ingest.words import asked_words
from kvrag.server.responses import Annotation, URLCitation

Span = tuple[int, int]

_LINE = regex.compile(r"[^\n]+")
# Before a sentence: marks of lists and quotes. A numbered item's mark is no sentence.
_MARK = regex.compile(r"\s*(?:(?:[-*+•]|\d+[.)])\s+|>\s*)*")
# A capital alone before a full stop is an initial. A run of marks is looked at once, not from each
# of them on: it may be long.
_END = regex.compile(
    "(?:(?<!\\b\\p{Lu}|[.!?\u2026])|(?<=\\b\\p{Lu}[.!?\u2026]))[.!?\u2026]++[\"'\u201d\u2019)\\]*_`]*+\\s+"
    "|[\u3002\uff01\uff1f]+[\u201d\u2019\u300d\u300f\uff09]*"
)
# Line ends that an editor put into a paragraph; the page has the same rule.
_WRAPPED = regex.compile("(?m)^(.{50,})\n(?=[\\p{L}\\p{N}\u201c\"'(\u00a3$\u20ac](?!\\d*[.)]\\s))")
_FEWEST_WORDS = 3  # fewer are no sentence: "Dr.", "e.g."

# How much of a sentence's weight its passage must have.
_LEAST = 0.5
# And how much of a rare word's weight: words that are everywhere say nothing.
_LEAST_OF_RARE = 0.3
# The best sentence of a passage, and the question's words, beside all words of the passage.
_OF_SENTENCE = 0.5
_OF_QUESTION = 0.25
# A passage that fits nearly as well as the best one is named, too.
_NEARLY = 0.95
_MOST = 3


@dataclass(frozen=True)
class Support:
    """A sentence of an answer, and a passage that it rests on.

    Attributes
    ----------
    sentence
        Where the sentence begins and ends in the answer.
    passage
        The passage's number.
    best
        Where the sentence that fits best begins and ends in the passage.
    """

    sentence: Span
    passage: int
    best: Span


def sentences(text: str) -> Iterator[Span]:
    """Yield where sentences begin and end, in any script; headings are none."""
    text = _WRAPPED.sub(r"\1 ", text)  # as long as before
    for line in _LINE.finditer(text):
        begin = _MARK.match(text, line.start(), line.end()).end()
        if begin == line.end() or text[begin] == "#":
            continue
        found: list[Span] = []
        last, num_words = begin, 0
        for end in [*(one.end() for one in _END.finditer(text, begin, line.end())), line.end()]:
            num_words += sum(1 for _ in asked_words(text[last:end]))
            last = end
            if num_words >= _FEWEST_WORDS or (end == line.end() and not found):
                found.append((begin, end))
                begin, num_words = end, 0
        if found:
            found[-1] = (found[-1][0], line.end())
        for start, end in found:
            yield start, start + len(text[start:end].rstrip())


class _Passage:
    """A passage's sentences and words."""

    def __init__(self, text: str) -> None:
        self.spans = [*sentences(text)] or [(0, len(text))]
        self.sentences = [{*asked_words(text[start:end])} for start, end in self.spans]
        self.words = {*asked_words(text)}
        self._places: dict[str, list[int]] = {}
        for place, words in enumerate(self.sentences):
            for word in words:
                self._places.setdefault(word, []).append(place)

    def best(self, weights: Mapping[str, float]) -> int:
        """Return the number of the sentence whose words weigh most; the first of equal ones."""
        found = [0.0] * len(self.spans)
        for word, weight in weights.items():
            for place in self._places.get(word, ()):
                found[place] += weight
        return found.index(max(found))


def supports(answer: str, texts: Sequence[str], question: str = "") -> list[Support]:
    """Return what each sentence of an answer rests on, in the answer's order, best first.

    A word weighs more in fewer sentences of the passages. A sentence of whose words no passage has
    enough rests on none.

    Parameters
    ----------
    answer, texts
        The answer, and the passages that it was read from.
    question
        What was asked: it says which of two passages a short answer is from.
    """
    passages = [*map(_Passage, texts)]
    in_sentences = Counter(word for one in passages for words in one.sentences for word in words)
    total = sum(len(one.sentences) for one in passages)

    @cache
    def of(word: str) -> float:
        return math.log((total + 1) / (in_sentences[word] + 0.5))

    def weight(words: Iterable[str]) -> float:
        return sum(map(of, words))

    asked = {*asked_words(question)}
    found = []
    for start, end in sentences(answer):
        said = {*asked_words(answer[start:end])}
        # What only repeats the question may be in no passage.
        least = max(
            _LEAST * weight(said - (asked - in_sentences.keys())),
            _LEAST_OF_RARE * math.log(total + 1),
        )
        weights = {word: of(word) for word in said}
        weights |= {word: _OF_QUESTION * of(word) for word in asked - said}
        scored = []
        for number, passage in enumerate(passages):
            shared = weight(said & passage.words)
            if shared < least:
                continue
            best = passage.best(weights)
            score = shared + _OF_SENTENCE * weight(said & passage.sentences[best])
            score += _OF_QUESTION * weight((asked - said) & passage.words)
            scored.append((score, number, passage.spans[best]))
        scored.sort(key=lambda one: (-one[0], one[1]))
        found += [
            Support((start, end), number, best)
            for score, number, best in scored[:_MOST]
            if score >= _NEARLY * scored[0][0]
        ]
    return found


def chunks_around(
    index: Index, chunk_id: str, before: int, after: int | None = None
) -> list[Chunk]:
    """Return a chunk and its neighbours in the document, in order; nothing for an unknown id.

    Parameters
    ----------
    index, chunk_id
        The index, and a chunk of it.
    before, after
        Most neighbours on each side; None: as many after it as before it.
    """
    chunks = index.get_chunks([chunk_id])
    if not chunks:
        return []
    ids = index.catalog.chunk_ids_of(chunks[0].source)
    if chunk_id not in ids:  # a writer was here between the two
        return chunks
    at = ids.index(chunk_id)
    end = at + (before if after is None else after) + 1
    return index.get_chunks(ids[max(0, at - before) : end])


def title_of(one: Chunk | DocumentRow) -> str:
    """Return the title of a document or a chunk's document, or the name of its file."""
    return str(one.metadata.get("title") or PurePath(one.source).name)


def citations(answer: Answer, question: str = "") -> list[Annotation]:
    """Return citations of each chunk that was in the prompt, best first.

    Parameters
    ----------
    answer
        The answer.
    question
        What was asked.

    Returns
    -------
    list of Annotation
        For each chunk, the sentences that rest on it; the whole answer if none does.
    """
    placed: dict[int, list[tuple[Span, Span | None]]] = {}
    for one in supports(answer.text, [one.text for one in answer.sources], question):
        placed.setdefault(one.passage, []).append((one.sentence, one.best))
    whole: list[tuple[Span, Span | None]] = [((0, len(answer.text)), None)]
    return [
        Annotation(url_citation=cited(source, sentence, best))
        for number, source in enumerate(answer.sources)
        for sentence, best in placed.get(number, whole)
    ]


def cited(source: Source | Chunk, sentence: Span = (0, 0), best: Span | None = None) -> URLCitation:
    """Return the citation of a chunk for a part of an answer."""
    start, end = sentence
    return URLCitation(
        start_index=start,
        end_index=end,
        title=PurePath(source.source).name,
        url=f"{source.source}#{source.ordinal}",
        chunk_id=source.chunk_id,
        ordinal=source.ordinal,
        text=source.text,
        best=best,
    )
