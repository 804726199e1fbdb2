"""Limits on the cost of reading a document."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from kvrag.arguments import shown
from kvrag.errors import ParameterError

MAX_METADATA_CHARACTERS = 1 << 20
"""The largest size of one document's metadata, as JSON."""
MAX_METADATA_VALUES = 100_000
MAX_METADATA_DEPTH = 32
MAX_DOCUMENTS = 1_000_000
"""The largest number of table rows in one file."""
MAX_REPEATED_CHARACTERS = 256 << 20
"""The largest total of what every chunk repeats of its document: source and metadata."""
MAX_TITLE_CHARACTERS = 256
"""The largest length of titles and headings; longer ones are cut."""

MAX_MARKS = 50_000
"""The largest number of places in a document's outline."""
MAX_MARKS_CHARACTERS = 1 << 19
"""The largest total of their titles."""
MAX_LEVEL = 31


@dataclass(frozen=True)
class ParseLimits:
    """Limits on the cost of a file; a file that exceeds one is refused, and the others go on.

    Attributes
    ----------
    max_file_bytes
        The largest size of a file in bytes, and of its whole text in characters.
    seconds
        Wall time for parsing one file. The process that parses has one computing thread, so this
        limits CPU time too.
    memory_bytes
        Memory that parsing may use beyond what the process had at its start. It applies only
        where the system enforces ``RLIMIT_AS``: on Linux, but not on macOS or Windows.

    Raises
    ------
    ParameterError
        When a value is not a number above 0.
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
                    f"limit {field.name}={shown(value)}: expected a "
                    f"{'whole ' if whole else ''}number "
                    "above 0"
                )
