"""Who is judged on a question, and the judgement: plain records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvrag.eviction import NO_EVICTION
from kvrag.ingest.contexts import NO_CONTEXT
from kvrag_bench.judge.questions import JudgedQuestion, RenderedPrompt

DEFAULT_CODEC = "raw"


@dataclass(frozen=True)
class Contestant:
    """A policy at a ratio over a codec, with the other choices that a figure depends on.

    Chunks are encoded after a context, by a writer or without one, with or without links.
    Answers use all keys or those that an eviction leaves.
    """

    policy: str
    ratio: float | None
    codec: str = DEFAULT_CODEC
    context: str = NO_CONTEXT
    linked: bool = False
    eviction: str = NO_EVICTION
    written: bool = False

    @property
    def with_full_cache(self) -> Contestant:
        """The same without eviction."""
        return replace(self, eviction=NO_EVICTION)


@dataclass(frozen=True)
class Asked:
    """A question with its prompt, and who is judged on it."""

    question: JudgedQuestion
    prompt: RenderedPrompt
    contestants: Sequence[Contestant] = ()


@dataclass(frozen=True)
class Reply:
    """What full prefill, or a policy, makes of one question.

    Attributes
    ----------
    text
        Its greedy answer; None if it was not generated.
    gold
        Mean log-probability a token of the first accepted answer.
    choices
        The same of each of the question's choices.
    """

    text: str | None
    gold: float
    choices: tuple[float, ...] = ()


@dataclass(frozen=True)
class Judgement:
    """One question under one contestant, with what full prefill made of it.

    Attributes
    ----------
    question
        The question.
    given, reference
        The contestant's reply, and full prefill's.
    kl, agrees
        At each token of the reference's answer.
    ttft_seconds, plain_ttft_seconds
        From the prompt's text to the first token.
    num_recomputed, num_found
        Reused tokens computed again, of those found in the store and not exact.
    num_cached, num_prompt
        Prompt tokens whose stored KV was kept, of all.
    num_rows, work_share
        Rows computed, summed over layers; and that, with what the choice alone computes, over those
        of full prefill.
    stored_bytes, stored_tokens
        Records of the question's chunks.
    kept_share
        Keys that an eviction left of the prompt's, mean over layers and heads.
    """

    question: JudgedQuestion
    given: Reply
    reference: Reply
    kl: tuple[float, ...]
    agrees: tuple[bool, ...]
    ttft_seconds: float
    plain_ttft_seconds: float
    num_recomputed: int
    num_found: int
    num_cached: int
    num_prompt: int
    num_rows: int
    work_share: float
    stored_bytes: int
    stored_tokens: int
    kept_share: float = 1.0
