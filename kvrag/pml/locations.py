"""Places in files of markup or programs, and errors that name them."""

from __future__ import annotations

from dataclasses import dataclass

from kvrag.errors import PMLError


@dataclass(frozen=True)
class Location:
    """A location in a file of markup or a program.

    Attributes
    ----------
    file
        The file, as the caller named it.
    line, column
        Both counted from 1.
    """

    file: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"

    def error(self, problem: str, remedy: str) -> PMLError:
        """Return an error about a problem at this place."""
        return PMLError(f"{self}: {problem}; {remedy}", self.file, self.line, self.column)
