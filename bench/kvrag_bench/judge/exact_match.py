"""Exact match: whether an answer's text is right."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise_answer(text: str) -> str:
    """Return `text` as SQuAD compares it: lower case, no punctuation, no articles, one blank."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(given: str, answers: Sequence[str]) -> float:
    """Return 1 if the normalised text equals an accepted answer's, otherwise 0."""
    normalised = normalise_answer(given)
    return float(any(normalised == normalise_answer(answer) for answer in answers))
