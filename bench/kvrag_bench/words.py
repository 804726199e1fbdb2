"""`kvrag bench words`: whether a search by words finds a passage, in any language."""

from __future__ import annotations

import random
import re
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrag.errors import ParameterError
from kvrag.ingest.loaders import load_bytes
from kvrag.ingest.words import any_word_of, asked_words, folded, is_spaceless, words_of

_SHORTEST = 20  # characters of a passage
_PIECE = 8  # characters in a row that are asked for, where words have no spaces
_PIECE_WORDS = 3
_RARE = 10  # a word is asked for if no more than a tenth of the passages has it
_DEPTH = 4


@dataclass(frozen=True)
class WordsRow:
    """One way of cutting texts into words, over one file.

    Attributes
    ----------
    file, way
        The file's name, and how texts and questions were cut.
    asked
        What was searched for: a ``piece`` of a passage, or ``one`` or ``two`` words of it.
    num_questions
        One for each passage that has such a piece or words.
    recall_1, recall_4
        Share of the questions whose passage, or another one that holds the whole question, is the
        first result, or among the first four.
    index_ratio
        Bytes of the full-text index of all files for each byte of text.
    """

    file: str
    way: str
    asked: str
    num_questions: int
    recall_1: float
    recall_4: float
    index_ratio: float


@dataclass(frozen=True)
class _Way:
    """A tokenizer of SQLite, with what is done before it to texts and questions."""

    tokenizer: str
    text: Callable[[str], str]
    match: Callable[[str], str]


def _any_of(words: Sequence[str]) -> str:
    return " OR ".join(f'"{word}"' for word in dict.fromkeys(words))


def _trigrams(question: str) -> str:
    words = re.findall(r"\S+", folded(question).replace('"', " "))
    return _any_of([word[i : i + 3] for word in words for i in range(max(1, len(word) - 2))])


_WAYS = {
    "SQLite's words": _Way(
        "unicode61 remove_diacritics 2", str, lambda asked: _any_of(re.findall(r"\w+", asked))
    ),
    "trigrams": _Way("trigram", folded, _trigrams),
    "kvrag": _Way("ascii", lambda text: " ".join(words_of(text)), any_word_of),
}


def run_words_bench(paths: Sequence[Path]) -> Iterator[WordsRow]:
    """Yield rows for files of one language each; all their passages are in one index.

    With icu4py installed, ICU's dictionaries are one of the ways, and choose words to ask for.

    Raises
    ------
    ParameterError
        When a file is missing, or has no passage of 20 characters.
    DocumentError
        When a file cannot be read.
    """
    passages = {path: _passages(path) for path in paths}
    texts = [text for path in paths for text in passages[path]]
    breaker = _breaker()
    ways = dict(_WAYS)
    if breaker is not None:

        def cut(text: str) -> list[str]:
            return _icu_words(breaker, folded(text))

        ways["ICU"] = _Way("ascii", lambda text: " ".join(cut(text)), lambda one: _any_of(cut(one)))
    tables = {name: _indexed(way, texts) for name, way in ways.items()}
    size = sum(len(text.encode()) for text in texts)
    first = 0
    for path, own in passages.items():
        for asked in ("piece", "one", "two") if breaker is not None else ("piece",):
            draw = random.Random(f"{path.stem} {asked}")
            questions = [
                (parts, {first + n for n, text in enumerate(own) if _holds(text, parts)})
                for passage in own
                if (parts := _parts(passage, own, asked, draw, breaker))
            ]
            for name, way in ways.items():
                table, num_bytes = tables[name]
                ranks = [_rank(table, way.match(" ".join(p)), right) for p, right in questions]
                yield WordsRow(
                    file=path.stem,
                    way=name,
                    asked=asked,
                    num_questions=len(questions),
                    recall_1=sum(rank == 1 for rank in ranks) / max(1, len(ranks)),
                    recall_4=sum(rank > 0 for rank in ranks) / max(1, len(ranks)),
                    index_ratio=num_bytes / size,
                )
        first += len(own)


def _passages(path: Path) -> list[str]:
    if not path.is_file():
        raise ParameterError(f"{path}: there is no such file; expected a text or an HTML page")
    lines = "\n".join(one.text for one in load_bytes(str(path), path.read_bytes())).split("\n")
    found = [line for line in map(str.strip, lines) if len(line) >= _SHORTEST]
    if not found:
        raise ParameterError(f"{path}: expected lines of at least {_SHORTEST} characters")
    return found


def _indexed(way: _Way, texts: Sequence[str]) -> tuple[sqlite3.Connection, int]:
    """Return a table of texts by their place, and the size of its index."""
    table = sqlite3.connect(":memory:")
    table.execute(f"CREATE VIRTUAL TABLE words USING fts5(text, tokenize = '{way.tokenizer}')")
    table.executemany(
        "INSERT INTO words (rowid, text) VALUES (?, ?)", enumerate(map(way.text, texts))
    )
    table.execute("INSERT INTO words (words) VALUES ('optimize')")
    (num_bytes,) = table.execute("SELECT SUM(LENGTH(block)) FROM words_data").fetchone()
    return table, num_bytes


def _rank(table: sqlite3.Connection, match: str, right: set[int]) -> int:
    """Return the rank of the first right text among the first four, 0 if there is none."""
    if not match:
        return 0
    found = table.execute(
        "SELECT rowid FROM words WHERE words MATCH ? ORDER BY bm25(words), rowid LIMIT ?",
        (match, _DEPTH),
    )
    return next((rank for rank, (row,) in enumerate(found, 1) if row in right), 0)


def _parts(
    passage: str, others: Sequence[str], asked: str, draw: random.Random, breaker: Any
) -> list[str]:
    """Return what to ask for to find a passage; nothing if it has too little."""
    if asked == "piece":
        words = list(re.findall(r"[^\W_][^\s]*", passage))
        runs = [word for word in words if is_spaceless(word) and len(word) > 2 * _PIECE]
        if runs:
            run = draw.choice(runs)
            start = draw.randrange(len(run) - _PIECE + 1)
            return [run[start : start + _PIECE]]
        start = draw.randrange(max(1, len(words) - _PIECE_WORDS + 1))
        return words[start : start + _PIECE_WORDS] if len(words) > _PIECE_WORDS else []
    most = max(3, len(others) // _RARE)
    rare = sorted(
        word
        for word in {_stem(one) for one in _icu_words(breaker, passage)}
        if len(word) > 1 and sum(word in text for text in others) <= most
    )
    number = 1 if asked == "one" else 2
    return draw.sample(rare, number) if len(rare) >= number else []


def _stem(word: str) -> str:
    """Return a word as somebody asks for it: a Korean one without the particle at its end."""
    is_korean = "\N{HANGUL SYLLABLE GA}" <= word[0] <= "\N{HANGUL SYLLABLE HIH}"
    return word[:-1] if is_korean and len(word) > 2 else word


def _holds(text: str, parts: Sequence[str]) -> bool:
    return all(part in text for part in parts)


def _breaker() -> Any:
    try:
        from icu4py.breakers import WordBreaker
    except ImportError:
        return None
    return WordBreaker


def _icu_words(breaker: Any, text: str) -> list[str]:
    return [word for one in breaker(text, "en") if (word := one.strip()) and any(asked_words(word))]
