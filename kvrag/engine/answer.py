"""What the engine gives back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from kvrag.fusion.report import FusionReport

FinishReason = Literal["stop", "length", "timeout"]


@dataclass(frozen=True)
class Source:
    """A chunk that was found in the prompt.

    Attributes
    ----------
    chunk_id, source, ordinal, text, metadata
        As in `kvrag.Chunk`.
    """

    chunk_id: str
    source: str
    ordinal: int
    text: str
    metadata: Mapping[str, Any]


@dataclass(frozen=True)
class Usage:
    """Token counts of one answer; `cached_tokens` of the prompt came from stored KV."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class Answer:
    """A finished answer.

    Attributes
    ----------
    text
        The answer, without the prompt, special tokens or the stop string that ended it.
    sources
        The chunks found in the prompt, in its order, each once.
    report
        How the prompt's KV was made.
    usage
        Token counts.
    finish_reason
        ``"stop"`` (end of text or a stop string), ``"length"`` (tokens asked for, or the context
        window, used up) or ``"timeout"``.
    ttft_seconds, total_seconds
        From the call to the first token, and to the end.
    """

    text: str
    sources: tuple[Source, ...]
    report: FusionReport
    usage: Usage
    finish_reason: FinishReason
    ttft_seconds: float
    total_seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            **asdict(self),
            "sources": [asdict(source) for source in self.sources],
            "report": self.report.to_dict(),
        }


@dataclass(frozen=True)
class AnswerDelta:
    """A piece of an answer being streamed; only the last piece carries the whole `answer`."""

    text: str
    answer: Answer | None = None
