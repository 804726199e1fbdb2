"""Where something stands in a file, and the error that says so."""

from __future__ import annotations

from dataclasses import dataclass

from kvrag.errors import PMLError


@dataclass(frozen=True)
class Location:
    """A location in a file of markup or a program.

    Attributes
    ----------
    file
        As it was named by the caller.
    line, column
        Both from 1.
    """

    file: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"

    def error(self, problem: str, remedy: str) -> PMLError:
        """Return the error to raise for a problem here."""
        return PMLError(f"{self}: {problem}; {remedy}", self.file, self.line, self.column)
