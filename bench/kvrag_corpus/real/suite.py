"""The sets by name."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from kvrag_corpus.real.asked import Asked
from kvrag_corpus.real.biography import biographies
from kvrag_corpus.real.bridge import bridges
from kvrag_corpus.real.carried import carried_over
from kvrag_corpus.real.code import code
from kvrag_corpus.real.needle import needles
from kvrag_corpus.real.summary import summaries

_CHUNKS = {str(count): count for count in (2, 4, 8)}
_TOKENS = {f"{thousands}k": 1000 * thousands for thousands in (2, 4, 8)}
_KEYS = {"needle": 1, "needles": 4}

SETS = (
    *(f"biography:{size}" for size in _CHUNKS),
    *(f"{name}:{size}" for name in _KEYS for size in _TOKENS),
    "carried",
    "bridge",
    "code",
    "summary",
)
"""The names of the sets."""


def generate_set(
    name: str, seed: int, num_questions: int, *, prose: Sequence[str], pages: Sequence[str]
) -> list[Asked]:
    """Return the first questions of a set.

    Parameters
    ----------
    name
        One of `SETS`.
    seed
        The same seed gives the same questions.
    num_questions
        How many.
    prose
        Chunks of text that needles are hidden in.
    pages
        Pages to summarise.

    Raises
    ------
    ValueError
        When there is no set of this name, or `prose` is too short for it.
    """
    if name not in SETS:
        raise ValueError(f"no real set {name!r}; there are {', '.join(SETS)}")
    kind, _, size = name.partition(":")
    match kind:
        case "biography":
            questions = biographies(_CHUNKS[size], seed)
        case "carried":
            questions = carried_over(seed)
        case "bridge":
            questions = bridges(seed)
        case "code":
            questions = code(seed)
        case "summary":
            questions = summaries(pages, seed)
        case _:
            questions = needles(_KEYS[kind], _TOKENS[size], prose, seed)
    return list(islice(questions, num_questions))
