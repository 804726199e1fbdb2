"""The options of `kvrag bench peers`."""

from __future__ import annotations

from dataclasses import dataclass

from kvrag.errors import ParameterError
from kvrag_bench.peers.systems import PEERS


@dataclass(frozen=True)
class PeersOptions:
    """What to measure.

    Attributes
    ----------
    model
        A name of `kvrag models`.
    peers
        Names in `PEERS`; those that are not installed are left out.
    num_chunks
        Chunks of the handbook in each prompt.
    num_sets
        Sets of chunks, each asked about three times.
    max_tokens
        Length of an answer.
    seed
        Of the choice and the order of chunks.
    timeout_seconds
        For one tool.
    """

    model: str = "smollm2-135m"
    peers: tuple[str, ...] = tuple(PEERS)
    num_chunks: int = 8
    num_sets: int = 3
    max_tokens: int = 24
    seed: int = 0
    timeout_seconds: float = 1800.0

    def __post_init__(self) -> None:
        if min(self.num_chunks, self.num_sets, self.max_tokens) < 1:
            raise ParameterError("bench peers: chunks, sets and tokens must be 1 or more")
        if unknown := [name for name in self.peers if name not in PEERS]:
            raise ParameterError(
                f"bench peers: no tool {unknown[0]!r}; expected some of: {', '.join(PEERS)}"
            )
