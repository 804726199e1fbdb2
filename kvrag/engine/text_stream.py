"""Token ids to text piece by piece: cuts at stop strings, holds back text that may still change."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from kvrag.models.tokens import num_continued
from kvrag.models.tools import CALL_MARKERS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_INCOMPLETE = "\ufffd"


class TextStream:
    """The text of one answer as its tokens arrive.

    The stream withholds characters with incomplete bytes, and text that may begin a stop string,
    until they are final.

    Parameters
    ----------
    tokenizer
        Decodes the tokens, without special tokens.
    stop
        Strings that end the answer; the text does not include them.
    is_calling
        Whether the answer may call tools: special tokens that mark a call are text then.
    stop_loops
        Whether the answer ends where it repeats itself without end.

    Attributes
    ----------
    stopped
        Whether a stop string ended the answer.
    looped
        Whether it ended because it repeats itself.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop: Sequence[str] = (),
        *,
        is_calling: bool = False,
        stop_loops: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._hidden = special_ids_but(CALL_MARKERS, tokenizer) if is_calling else None
        self._token_ids: list[int] = []
        self._shown = 0
        self.text = ""
        self.stopped = self.looped = False
        self._stop_loops = stop_loops

    @property
    def num_shown(self) -> int:
        """Number of characters that `push` and `finish` have returned."""
        return self._shown

    def start_of(self, token_id: int) -> int:
        """Return where the text of the next token will begin, perhaps inside a character."""
        shown = [one for one in self._token_ids if one not in self._special]
        return len(self.text) - num_continued(self._tokenizer, shown, token_id)

    @cached_property
    def _special(self) -> frozenset[int]:
        """Tokens that are no text."""
        return self._hidden or special_ids_but((), self._tokenizer)

    def push(self, token_id: int) -> str:
        """Add a token; return the text that has become final."""
        self._token_ids.append(token_id)
        self.text = self._decode()
        cut = min((at for s in self._stop if (at := self.text.find(s)) >= 0), default=-1)
        if cut >= 0:
            self.text, self.stopped = self.text[:cut], True
            return self._show(cut)
        # Inside a block of code, repetition is meant.
        if self._stop_loops and self.text.count("```") % 2 == 0:
            self.looped = is_loop(
                self._token_ids, lambda ids: str(self._tokenizer.decode(list(ids)))
            )
        settled = len(self.text)
        while settled > self._shown and self.text[settled - 1] == _INCOMPLETE:
            settled -= 1
        return self._show(settled - self._undecided(self.text[:settled]))

    def finish(self) -> str:
        """Return the text withheld so far; call this after the last token."""
        return self._show(len(self.text))

    def _decode(self) -> str:
        # Decodes the whole answer each time, because byte-level and SentencePiece decoders need
        # the tokens to the left. That is quadratic, but takes milliseconds for a thousand tokens.
        hidden = self._hidden or ()
        return str(
            self._tokenizer.decode(
                [one for one in self._token_ids if one not in hidden],
                skip_special_tokens=self._hidden is None,
                clean_up_tokenization_spaces=False,
            )
        )

    def _undecided(self, text: str) -> int:
        """Return how many characters at the end could begin a stop string."""
        longest = max((len(s) for s in self._stop), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(s.startswith(text[-length:]) for s in self._stop):
                return length
        return 0

    def _show(self, end: int) -> str:
        if end <= self._shown:
            return ""
        piece = self.text[self._shown : end]
        self._shown = end
        return piece


def special_ids_but(markers: Collection[str], tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the special tokens, which are no text, except for `markers`."""
    special = set(tokenizer.all_special_ids)
    special |= {number for number, one in tokenizer.added_tokens_decoder.items() if one.special}
    return frozenset(special - {tokenizer.convert_tokens_to_ids(one) for one in markers})


def end_ids(generation_config: object, tokenizer: object) -> frozenset[int]:
    """Return the end-of-text tokens that the model and its tokenizer declare."""
    declared = getattr(generation_config, "eos_token_id", None)
    ids = set(declared if isinstance(declared, list) else [declared])
    ids.add(getattr(tokenizer, "eos_token_id", None))
    return frozenset(ids - {None})


# Greedy answers of small models repeat themselves without end. A repetition penalty would prevent
# it, but it made answers worse: of 14 questions, 3 were answered right instead of 7. So the answer
# just ends. Only sentences count: what lists, tables, code and JSON repeat is meant.
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
