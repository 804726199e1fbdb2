"""How chunks are compressed at ingestion, by name: ``kvzip:0.5``, ``anchors:0.75``, ``none``."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvrag.errors import ParameterError

NO_COMPRESSION = "none"
DROP = "drop"
"""The tokens that say most are kept (LLMLingua's family; KVLink §2.4, option 1)."""
ANCHORS = "anchors"
"""Trained tokens stand for blocks of the chunk (improved ANLLMs; KVLink §2.4, option 2)."""
KVZIP = "kvzip"
"""Each head keeps the keys that it needs most to say the chunk again (KVzip)."""
KINDS = (KVZIP, DROP, ANCHORS)

BLOCK_TOKENS = 100
"""Tokens of a block that has anchors of its own (KVLink §2.4: s = 100)."""


@dataclass(frozen=True)
class Compression:
    """What is left of a chunk's KV.

    Attributes
    ----------
    kind
        One of `KINDS`.
    rate
        Share of the chunk's rows that is not stored, above 0 and below 1.
    """

    kind: str
    rate: float

    def __str__(self) -> str:
        return f"{self.kind}:{self.rate:g}"

    @property
    def share(self) -> float:
        """Share of a chunk's rows that is stored."""
        return 1.0 - self.rate

    def num_rows(self, num_tokens: int) -> int:
        """Return the rows stored of a chunk of so many tokens, at least 1.

        Rounded up: for each block with anchors, else for the whole chunk.
        """
        if self.kind != ANCHORS:
            return self._rows_of(num_tokens)
        full, rest = divmod(num_tokens, BLOCK_TOKENS)
        return full * self._rows_of(BLOCK_TOKENS) + (self._rows_of(rest) if rest else 0)

    def anchored_tokens(self, num_tokens: int) -> list[int]:
        """Return the tokens of a chunk at which its anchors stand: the last of each of as many
        even parts of a block as it has anchors.
        """
        found = []
        for first in range(0, num_tokens, BLOCK_TOKENS):
            length = min(BLOCK_TOKENS, num_tokens - first)
            count = self._rows_of(length)
            found += [first + (place + 1) * length // count - 1 for place in range(count)]
        return found

    def _rows_of(self, num_tokens: int) -> int:
        # 0.75 * 100 may be a little off in binary; that little is not another row.
        return math.ceil(self.share * num_tokens - 1e-9)


def parse_compression(text: str) -> Compression | None:
    """Return what ``"kvzip:0.5"`` or ``"anchors:0.75"`` names, or None for ``"none"``.

    Raises
    ------
    ParameterError
        For anything else, or a rate that leaves nothing or everything.
    """
    if text == NO_COMPRESSION:
        return None
    if not isinstance(text, str):
        raise ParameterError(f"compression {text!r}: expected a name such as '{KVZIP}:0.5'")
    kind, colon, rate_text = text.partition(":")
    try:
        # As it is recorded: one that rounds to 1 could not be read again.
        rate = float(f"{float(rate_text):g}")
    except ValueError:
        rate = math.nan
    if kind not in KINDS or not colon or not 0.0 < rate < 1.0:
        raise ParameterError(
            f"compression {text!r}: expected {NO_COMPRESSION}, or one of {', '.join(KINDS)} with "
            f"the share of rows that is not stored, above 0 and below 1, as in '{KVZIP}:0.5'"
        )
    return Compression(kind, rate)


def key_options(compression: Compression | None, anchors_digest: str) -> dict[str, str]:
    """Return the options of a chunk's key that compression adds (`kvrag.chunk.chunk_key`)."""
    if compression is None:
        return {}
    options = {"compression": str(compression)}
    if anchors_digest:
        options["anchors"] = anchors_digest
    return options
