"""What reading a document may cost at the most."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from kvrag.errors import ParameterError

MAX_METADATA_CHARACTERS = 1 << 20
"""Of one document's metadata, as JSON."""
MAX_METADATA_VALUES = 100_000
MAX_METADATA_DEPTH = 32
MAX_DOCUMENTS = 1_000_000
"""Of one file: rows of a table."""
MAX_REPEATED_CHARACTERS = 256 << 20
"""Of what each chunk of a document repeats: its source and metadata."""
MAX_TITLE_CHARACTERS = 256
"""Of titles and headings; longer ones are cut."""


@dataclass(frozen=True)
class ParseLimits:
    """What a file of documents may cost; one that costs more is refused, and the others go on.

    Attributes
    ----------
    max_file_bytes
        Bytes a file may have, and characters that all its text may have.
    seconds
        Wall time of parsing one file. The process that parses has one thread that computes, so
        that CPU time is limited with it.
    memory_bytes
        Memory that parsing may take beyond what the process had when it started. It holds where
        the system keeps ``RLIMIT_AS``: on Linux, and neither on macOS nor on Windows.

    Raises
    ------
    ParameterError
        When a value is no number above 0.
    """

    max_file_bytes: int = 50_000_000
    seconds: float = 60.0
    memory_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            whole = field.name != "seconds"
            is_number = isinstance(value, int if whole else int | float)
            if isinstance(value, bool) or not is_number or not 0 < value < math.inf:
                raise ParameterError(
                    f"limit {field.name}={value!r}: expected a {'whole ' if whole else ''}number "
                    "above 0"
                )
