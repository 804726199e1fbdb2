"""What the engine returns: answers, their sources and their token counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from kvrag.fusion.report import FusionReport

FinishReason = Literal["stop", "length", "loop", "timeout"]


@dataclass(frozen=True)
class Source:
    """A chunk found in the prompt.

    Attributes
    ----------
    chunk_id, source, ordinal, text, metadata
        See `kvrag.Chunk`.
    """

    chunk_id: str
    source: str
    ordinal: int
    text: str
    metadata: Mapping[str, Any]


@dataclass(frozen=True)
class Part:
    """Tokens ``[start, end)`` of a prompt that are treated alike.

    Attributes
    ----------
    state
        ``kept`` from an earlier answer, ``exact``, ``reused``, ``repaired`` (found, but recomputed
        in most layers), or ``fresh``.
    why
        The source of a chunk, or the reason of fresh tokens.
    text
        The part's text.
    layers
        For each token, the number of layers that computed it.
    """

    start: int
    end: int
    state: str
    why: str
    text: str
    layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class TokenLogprob:
    """A token of an answer, and how likely it was.

    Attributes
    ----------
    token_id
        The token.
    logprob
        The natural logarithm of the model's own probability: before temperature, penalties and
        constraints change it.
    start
        The first character of the answer's text to which the token adds.
    top
        The most likely tokens of that place, each with its logarithm, best first.
    """

    token_id: int
    logprob: float
    start: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Usage:
    """Token counts of one answer.

    `cached_tokens` counts prompt tokens whose KV was stored, or kept from an earlier answer.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class Answer:
    """A finished answer.

    Attributes
    ----------
    text
        The answer, without the prompt, special tokens and the stop string that ended it.
    sources
        The chunks found in the prompt, each once: those of `Request.hints` in that order, then the
        others in prompt order.
    report
        How the prompt's KV was computed.
    usage
        Token counts.
    finish_reason
        ``"stop"`` (end of text or a stop string), ``"length"`` (`max_tokens` or the context window
        is used up), ``"loop"`` (`Request.stop_loops`) or ``"timeout"``.
    ttft_seconds, total_seconds
        Seconds from the call to the first token, and to the end.
    parts
        What happened to each part of the prompt, if the request asks (`Request.explain`). Empty
        also with link tokens, which are not the prompt's tokens.
    logprobs
        How likely each token of `text` was, if the request asks (`Request.logprobs`).
    """

    text: str
    sources: tuple[Source, ...]
    report: FusionReport
    usage: Usage
    finish_reason: FinishReason
    ttft_seconds: float
    total_seconds: float
    parts: tuple[Part, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the answer as plain JSON values."""
        return {
            **asdict(self),
            "sources": [asdict(source) for source in self.sources],
            "report": self.report.to_dict(),
        }


@dataclass(frozen=True)
class Verdict:
    """An answer from reused KV beside full prefill, which reads the same tokens.

    Attributes
    ----------
    policy
        The recompute policy, without its parameters.
    num_tokens
        Tokens of the answer, and its end if the model chose it.
    num_agreed
        Those of them for which the likeliest token is the same.
    num_same
        Those of them before the first that differs.
    kl
        KL(full prefill || reused KV), the mean over all these tokens, in nats.
    instead
        What full prefill writes; None if it writes the same, or the answer was not greedy: drawn,
        penalised, of a form, or with tools.
    """

    policy: str
    num_tokens: int
    num_agreed: int
    num_same: int
    kl: float
    instead: str | None = None

    @property
    def is_same(self) -> bool:
        """Whether the likeliest token is the same everywhere."""
        return self.num_agreed == self.num_tokens

    def one_line(self) -> str:
        """Return the verdict as a sentence."""
        kl = f"KL {self.kl:.2g}"
        if self.is_same:
            return f"full prefill says the same: all {self.num_tokens} tokens, {kl}"
        return (
            f"full prefill differs from token {self.num_same + 1}, and agrees on "
            f"{self.num_agreed} of {self.num_tokens}, {kl}"
        )


@dataclass(frozen=True)
class AnswerDelta:
    """A piece of a streamed answer; only the last piece carries the whole `answer`.

    `logprobs` has the tokens of `text`, if the request asks for them. A token that adds to two
    pieces is in the first.
    """

    text: str
    answer: Answer | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
