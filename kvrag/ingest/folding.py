"""Texts as searches compare them: folded, and cut into words.

Everything that compares words uses this: the index of words (`kvrag.ingest.words`), the hashing
embedding, and what compares two texts. Stored texts stay as they are.

Scripts that write no spaces between words (Chinese, Japanese, Thai, Lao, Khmer, Burmese) have no
words here, but each two neighbouring characters; so has Korean, which joins particles to its words.
docs/results/retrieval.md has what else was tried.
"""

from __future__ import annotations

import itertools
import unicodedata
from collections.abc import Iterator

import regex

# Unicode's sets, with regex's own syntax: a set may be cut with another (&&), or lack it (--).
_LETTERS = r"[\p{L}\p{N}\p{M}\p{Co}]"
_SPACELESS = (
    r"[[\p{scx=Han}\p{scx=Hiragana}\p{scx=Katakana}\p{scx=Bopomofo}\p{Hangul}"
    rf"\p{{Line_Break=Complex_Context}}]&&{_LETTERS}]"
)
_WORD = regex.compile(rf"(?V1){_LETTERS}+")
_IS_SPACELESS = regex.compile(rf"(?V1){_SPACELESS}")
_PART = regex.compile(rf"(?V1){_SPACELESS}+|[{_LETTERS}--{_SPACELESS}]+")
_CHARACTER = regex.compile(r"\X")  # with the marks over and under it
_IGNORED = regex.compile(r"[\p{Default_Ignorable_Code_Point}\N{ARABIC TATWEEL}]")
_LONG = 4


def folded(text: str) -> str:
    """Return a text without what no reader searches for.

    Case, compatibility forms (ligatures, full-width and half-width letters), accents, vowel points,
    and invisible characters such as soft hyphens are folded. A dotless i is an i, as its capital
    is. Marks that are letters stay: vowels of Thai and Hindi, voiced kana.
    """
    if text.isascii():
        return text.lower()
    text = unicodedata.normalize("NFKD", text).casefold()
    changes = {ord(one): "" for one in set(text) if _is_accent(unicodedata.combining(one))}
    changes[ord("\N{LATIN SMALL LETTER DOTLESS I}")] = "i"
    return unicodedata.normalize("NFKC", _IGNORED.sub("", text.translate(changes)))


def words_of(text: str) -> Iterator[str]:
    """Yield a text's words, folded, for an index.

    A run of a script without spaces gives each two neighbouring characters, and its last one: so
    each of its characters begins a word.
    """
    for word, characters in _parts(text):
        if characters:
            yield from map("".join, itertools.pairwise([*characters, ""]))
        else:
            yield word


def asked_words(text: str) -> Iterator[str]:
    """Yield a text's words, folded, to look up: as `words_of`, without the last character of runs.

    A run of one character gives that one.
    """
    for word, characters in _parts(text):
        if len(characters) > 1:
            yield from map("".join, itertools.pairwise(characters))
        else:
            yield word


def long_words(text: str) -> set[str]:
    """Return the words that say what a text is about: four letters or more, or of such a run."""
    return {word for word in asked_words(text) if len(word) >= _LONG or is_spaceless(word)}


def is_spaceless(word: str) -> bool:
    """Return whether a word is from a run of a script without spaces."""
    return _IS_SPACELESS.match(word) is not None


def _parts(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield words, and the characters of those that are runs of scripts without spaces."""
    text = folded(text)
    if _IS_SPACELESS.search(text) is None:
        yield from ((word, []) for word in _WORD.findall(text))
        return
    for word in _PART.findall(text):
        yield word, _CHARACTER.findall(word) if is_spaceless(word) else []


def _is_accent(combining_class: int) -> bool:
    # Points of Hebrew, Arabic and Syriac; and what is above or below in any script.
    return 10 <= combining_class <= 36 or combining_class >= 202
