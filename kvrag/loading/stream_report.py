"""What streaming one context came to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class StreamedChunk:
    """One chunk that was streamed, or computed in its place.

    Attributes
    ----------
    chunk_id
        Its id.
    num_planes, most_planes
        Planes that were received and used, 0 for text; and those its record has.
    num_bytes
        Received.
    expected_seconds, seconds
        What receiving it was expected to take when it was asked for, and took; expectations that
        there were none of count as 0.
    bytes_per_second
        What the link was thought to carry when the chunk was asked for last; None: not known.
    """

    chunk_id: str
    num_planes: int
    most_planes: int
    num_bytes: int
    expected_seconds: float
    seconds: float
    bytes_per_second: float | None

    @property
    def level(self) -> str:
        """``text``, or its planes as in ``1/3``."""
        return f"{self.num_planes}/{self.most_planes}" if self.num_planes else "text"


@dataclass(frozen=True)
class StreamReport:
    """What streaming one context came to.

    Attributes
    ----------
    ttft
        Seconds within which the first token was asked for.
    seconds
        When it was there, or this report was made.
    chunks
        In the order of the prompt; those that could not be had are among the misses instead.
    expected_compute_seconds, compute_seconds
        What computing behind the stream was expected to take, and took; None: not known.
    """

    ttft: float
    seconds: float
    chunks: tuple[StreamedChunk, ...]
    expected_compute_seconds: float | None = None
    compute_seconds: float | None = None

    @property
    def is_met(self) -> bool:
        """Whether the first token came in time."""
        return self.seconds <= self.ttft

    @property
    def levels(self) -> Mapping[str, int]:
        """Chunks by level."""
        return dict(sorted(Counter(chunk.level for chunk in self.chunks).items()))

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values, the derived ones included."""
        return {**asdict(self), "is_met": self.is_met, "levels": dict(self.levels)}

    def one_line(self) -> str:
        """Return the report in a few words."""
        what = ", ".join(
            f"{count} {'as' if level == 'text' else 'at'} {level}"
            for level, count in self.levels.items()
        )
        late = "" if self.is_met else ", late"
        return f"{self.seconds:.2f} s of {self.ttft:g} s{late}: {what or 'no chunk'}"
