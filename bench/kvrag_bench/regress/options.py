"""What `kvrag bench regress` measures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvrag.errors import ParameterError

CODEC = "transform:1"
"""The codec that is measured."""

TINY = "kvrag-tiny"


@dataclass(frozen=True)
class RegressOptions:
    """What to measure. Results of other options are not comparable.

    Attributes
    ----------
    shape
        Speed is measured over random weights of this shape (`kvrag_bench.shapes.SHAPES`).
    num_chunks, chunk_tokens
        The prompt.
    num_lookup_chunks
        Chunks that a prompt is looked up among.
    rounds
        Timings of each ratio; one more runs first and does not count.
    models
        Models whose quality is measured; names of models that are not installed are skipped.
    num_questions
        Questions to kvrag-tiny. Others are asked a twenty-fifth of them, from each set of the real
        suite.
    """

    shape: str = "smollm2-135m"
    num_chunks: int = 8
    chunk_tokens: int = 250
    num_lookup_chunks: int = 10_000
    rounds: int = 6
    models: Sequence[str] = (TINY, "smollm2-135m")
    num_questions: int = 100

    def __post_init__(self) -> None:
        if min(self.num_chunks, self.chunk_tokens, self.num_lookup_chunks, self.num_questions) < 1:
            raise ParameterError("bench regress: chunks, tokens and questions must be 1 or more")
        if self.rounds < 2:
            raise ParameterError(
                f"bench regress: {self.rounds} rounds: expected at least 2, since noise shows only "
                "between timings"
            )
