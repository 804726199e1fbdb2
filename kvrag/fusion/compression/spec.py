"""Compression of chunks at ingestion, by name: ``drop:0.5``, ``anchors:0.75``, ``none``.

``text`` leaves out all rows: of a chunk only text and vector are stored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvrag.arguments import shown
from kvrag.errors import ParameterError

NO_COMPRESSION = "none"
DROP = "drop"
"""Keeps the most informative tokens (LLMLingua's family; KVLink §2.4, option 1)."""
ANCHORS = "anchors"
"""Replaces blocks of the chunk by trained tokens (improved ANLLMs; KVLink §2.4, option 2)."""
KVZIP = "kvzip"
"""Kept, for each head, the keys that it needs most to repeat the chunk. Indexes of kvrag 0.2 that
have it are read; nothing is encoded so any more."""
KINDS = (DROP, ANCHORS)
TEXT = "text"
"""No KV at all: that of models which compute prompts as wholes (`kvrag.models.whole`)."""

BLOCK_TOKENS = 100
"""Number of tokens in a block; each block has its own anchors (KVLink §2.4: s = 100)."""


@dataclass(frozen=True)
class Compression:
    """A kind of compression and its rate.

    Attributes
    ----------
    kind
        One of `KINDS`, or `TEXT`.
    rate
        Share of the chunk's rows that is not stored, above 0 and below 1; 1 for `TEXT`.
    """

    kind: str
    rate: float

    def __str__(self) -> str:
        return TEXT if is_text(self) else f"{self.kind}:{self.rate:g}"

    @property
    def share(self) -> float:
        """Share of a chunk's rows that is stored."""
        return 1.0 - self.rate

    def num_rows(self, num_tokens: int) -> int:
        """Return the number of rows stored for a chunk of `num_tokens` tokens, at least 1.

        It is rounded up for each block with anchors, and for the whole chunk otherwise.
        """
        if self.kind != ANCHORS:
            return self._rows_of(num_tokens)
        full, rest = divmod(num_tokens, BLOCK_TOKENS)
        return full * self._rows_of(BLOCK_TOKENS) + (self._rows_of(rest) if rest else 0)

    def anchored_tokens(self, num_tokens: int) -> list[int]:
        """Return the indices of the tokens at which a chunk's anchors are placed.

        A block is split into equal parts, one for each anchor; each anchor is at its part's end.
        """
        found = []
        for first in range(0, num_tokens, BLOCK_TOKENS):
            length = min(BLOCK_TOKENS, num_tokens - first)
            count = self._rows_of(length)
            found += [first + (place + 1) * length // count - 1 for place in range(count)]
        return found

    def _rows_of(self, num_tokens: int) -> int:
        # The tolerance keeps a rounding error of the product from adding a row.
        return math.ceil(self.share * num_tokens - 1e-9)


def is_text(compression: Compression | None) -> bool:
    """Return whether chunks have no KV."""
    return compression is not None and compression.kind == TEXT


def no_kv(place: object, why: str = "") -> str:
    """Return why what needs KV refuses an index of `TEXT`; `why` is the model's reason."""
    because = f" ({why})" if why else ""
    return (
        f"{place} stores no KV, because its model computes each prompt as a whole{because}. Take "
        "an index of another model"
    )


def parse_compression(text: str) -> Compression | None:
    """Return the compression named ``"drop:0.5"``, ``"anchors:0.75"`` or ``"text"``, or None.

    ``"none"`` gives None.

    Raises
    ------
    ParameterError
        If the name is unknown, or the rate is not above 0 and below 1.
    """
    if text == NO_COMPRESSION:
        return None
    if text == TEXT:
        return Compression(TEXT, 1.0)
    if not isinstance(text, str):
        raise ParameterError(f"compression {shown(text)}: expected a name such as '{DROP}:0.5'")
    kind, colon, rate_text = text.partition(":")
    try:
        # Rounded as in the index's configuration: a rate that rounds to 1 could not be read back.
        rate = float(f"{float(rate_text):g}")
    except ValueError:
        rate = math.nan
    if kind not in (*KINDS, KVZIP) or not colon or not 0.0 < rate < 1.0:
        raise ParameterError(
            f"compression {shown(text)}: expected {NO_COMPRESSION}, or one of {', '.join(KINDS)} "
            "with "
            f"the share of rows not to store, above 0 and below 1, as in '{DROP}:0.5'"
        )
    return Compression(kind, rate)


def key_options(compression: Compression | None, anchors_digest: str) -> dict[str, str]:
    """Return the options that compression adds to a chunk's key (`kvrag.chunk.chunk_key`)."""
    if compression is None:
        return {}
    options = {"compression": str(compression)}
    if anchors_digest:
        options["anchors"] = anchors_digest
    return options
