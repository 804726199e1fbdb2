"""Whether an answer repeats itself without end.

Greedy answers of small models do. A repetition penalty would prevent it, but it made answers worse:
of 14 questions, 3 were answered right instead of 7. So the answer just ends.

Only sentences count: what lists, tables, code and JSON repeat is meant.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

_LONGEST = 96
_WORD = re.compile(r"[^\W\d_]{2,}")
_MARK = re.compile(r"[^\w ]")
# In rows of tables, code and JSON, hardly in sentences.
_NO_PROSE = re.compile(r"[{}\[\]<>=|\t\\`;_]")
# Different words of what is repeated, and how often it has to follow itself.
_SENTENCE, _CLAUSE = (6, 3), (3, 4)
_MOST_OF_A_WORD = 24


def is_loop(token_ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> bool:
    """Return whether an answer's last tokens say the same again and again.

    Parameters
    ----------
    token_ids
        The answer so far.
    decode
        Returns the text of some of its tokens.
    """
    last = len(token_ids) - 1
    for period in range(1, min(_LONGEST, len(token_ids) // 3) + 1):
        if token_ids[last] != token_ids[last - period]:
            continue
        times = _times(token_ids, period)
        if times < _SENTENCE[1]:
            continue
        # Three of them, since one may begin and end inside a word.
        text = decode(token_ids[-3 * period :])
        words = {word.lower() for word in _WORD.findall(text)[1:-1]}
        says_enough = any(
            len(words) >= least and times >= often for least, often in (_SENTENCE, _CLAUSE)
        )
        # One word again and again, without the commas of a series.
        is_one_word = len(words) == 1 and times >= _MOST_OF_A_WORD and not _MARK.search(text)
        if (says_enough or is_one_word) and not _NO_PROSE.search(text):
            return True
    return False


def _times(token_ids: Sequence[int], period: int) -> int:
    """Return how often the last `period` tokens end the answer, one after the other."""
    span, times = list(token_ids[-period:]), 1
    end = len(token_ids) - period
    while end >= period and list(token_ids[end - period : end]) == span:
        times, end = times + 1, end - period
    return times
