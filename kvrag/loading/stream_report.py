"""The report on streaming one context."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class StreamedChunk:
    """One chunk that was streamed, or computed instead.

    Attributes
    ----------
    chunk_id
        The chunk's id.
    num_planes, most_planes
        Planes that were received and used, 0 for text; and planes of its record.
    num_bytes
        Bytes received.
    expected_seconds, seconds
        How long receiving it was expected to take, and how long it took. A request without an
        expectation counts as 0.
    bytes_per_second
        The link's estimated speed at the last request for the chunk; None if it was not known.
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
        """``text``, or its planes, such as ``1/3``."""
        return f"{self.num_planes}/{self.most_planes}" if self.num_planes else "text"


@dataclass(frozen=True)
class StreamReport:
    """The result of streaming one context.

    Attributes
    ----------
    ttft
        The requested time to first token, in seconds.
    seconds
        The time to first token, or the time until this report was made.
    chunks
        The chunks, in the order of the prompt. Those that could not be loaded are misses instead.
    expected_compute_seconds, compute_seconds
        How long computing after the stream was expected to take, and took; None if not known.
    """

    ttft: float
    seconds: float
    chunks: tuple[StreamedChunk, ...]
    expected_compute_seconds: float | None = None
    compute_seconds: float | None = None

    @property
    def is_met(self) -> bool:
        """Whether the first token was in time."""
        return self.seconds <= self.ttft

    @property
    def levels(self) -> Mapping[str, int]:
        """How many chunks were received at each level."""
        return dict(sorted(Counter(chunk.level for chunk in self.chunks).items()))

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values, including derived ones."""
        return {**asdict(self), "is_met": self.is_met, "levels": dict(self.levels)}

    def one_line(self) -> str:
        """Return a summary in one line."""
        what = ", ".join(
            f"{count} {'as' if level == 'text' else 'at'} {level}"
            for level, count in self.levels.items()
        )
        late = "" if self.is_met else ", late"
        return f"{self.seconds:.2f} s of {self.ttft:g} s{late}: {what or 'no chunk'}"
