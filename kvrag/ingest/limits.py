"""Limits on the cost of reading a document."""

from __future__ import annotations

from dataclasses import dataclass

from kvrag.optiontable import check_options, described, option

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


@described
@dataclass(frozen=True)
class ParseLimits:
    """Limits on the cost of a file; a file that exceeds one is refused, and the others go on.

    The process that parses has one computing thread, so the limit on wall time limits CPU time too.
    That on memory is for what it uses beyond its start, and applies only where the system enforces
    ``RLIMIT_AS``: on Linux, but not on macOS or Windows. Raises ParameterError for a value that is
    not a number above 0.
    """

    max_file_bytes: int = option(
        50_000_000, "Leave out files that are larger or contain more text.", least=1
    )
    seconds: float = option(60.0, "Leave out files that take longer to parse.", above=0)
    memory_bytes: int = option(
        1 << 30, "Leave out files that need more memory to parse (checked on Linux only).", least=1
    )

    def __post_init__(self) -> None:
        check_options(self)
