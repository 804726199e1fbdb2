"""The process in which llguidance first reads a grammar (`constraint.py` asks it).

The library recurses on its thread's stack, a frame for each rule that leads to the next, and ends
the process if that is too small. It has no limit of time for a grammar, and none that holds for the
tokens that may come first.
"""

from __future__ import annotations

import re
import threading

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from kvrag.process import serve

_MEMORY_BYTES = 256 << 20
# An eighth of what threads usually have: what fits here fits in any of them.
_STACK_BYTES = 1 << 20
_MOST_TOKENS = 1 << 19
_NUM_TRIED = 3  # tokens of an answer
_NAMED = re.compile(r"<[^<>\s\[\]]+>")
_NUMBERED = re.compile(r"<\[([^\[\]]*)\]>")


class _Letters:
    """A vocabulary of the 256 bytes, and of the special tokens that a grammar may name."""

    bos_token_id = None
    eos_token_id = 256

    def __init__(self, grammar: str) -> None:
        numbers = [int(one) for found in _NUMBERED.findall(grammar) for one in _digits(found)]
        room = min(max(numbers, default=0) + 1, _MOST_TOKENS)
        self.tokens = [*(bytes([one]) for one in range(256)), b"<eos>"]
        self.tokens += [b""] * (room - len(self.tokens))
        first = len(self.tokens)
        self.tokens += [one.encode() for one in sorted(set(_NAMED.findall(grammar)))]
        self.special_token_ids = [self.eos_token_id, *range(first, len(self.tokens))]

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


def _digits(text: str) -> list[str]:
    return re.findall(r"\d{1,9}", text)


def _answer(grammar: str) -> str:
    """Return what is wrong with a grammar, or nothing."""
    said: list[str] = []
    # Its end too is in the small stack: the library frees a grammar as deeply as it has read it.
    thread = threading.Thread(target=lambda: said.append(_check(grammar)), name="kvrag-grammar")
    thread.start()
    thread.join()
    if not said:
        raise MemoryError
    return said[0]


def _check(grammar: str) -> str:
    is_wrong, said = LLMatcher.validate_grammar_with_warnings(grammar)
    if is_wrong:
        return str(said[0])
    tokenizer = LLTokenizer(TokenizerWrapper(_Letters(grammar)))
    limits = LLParserLimits(verbose_errors=False)
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    for _ in range(_NUM_TRIED):
        if matcher.is_stopped():  # also after an error
            break
        allowed = matcher.compute_logit_bias()
        matcher.consume_token(next((i for i, one in enumerate(allowed) if one), 256))
    return str(matcher.get_error()) if matcher.is_error() else ""


def main() -> None:
    """Answer the parent."""
    threading.stack_size(_STACK_BYTES)
    serve(_answer, _MEMORY_BYTES)
