"""How a prompt's token ids reach vLLM, and the answer comes back piece by piece."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvrag.engine.sampling import Sampling


@dataclass(frozen=True)
class EngineRequest:
    """One prompt and how it is answered.

    Attributes
    ----------
    token_ids
        The prompt's.
    params
        Its ``kv_transfer_params`` (`kvrag.llms.vllm.settings.RequestParams`).
    max_tokens, sampling, stop
        As of `kvrag.KVEngine.generate`.
    ignore_end
        Whether the answer goes on behind the model's own end of text.
    is_streamed
        Whether pieces are wanted as they are made; a server sends kvrag's report only with a whole
        answer.
    """

    token_ids: Sequence[int]
    params: Mapping[str, Any]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop: Sequence[str] = ()
    ignore_end: bool = False
    is_streamed: bool = True

    def sampling_values(self) -> dict[str, Any]:
        """Return how tokens are drawn, in the names that vLLM and its server share."""
        sampling = self.sampling
        return {
            "max_tokens": self.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "repetition_penalty": sampling.repetition_penalty,
            "seed": sampling.seed,
            "stop": list(self.stop),
            "ignore_eos": self.ignore_end,
        }


@dataclass(frozen=True)
class Piece:
    """What came of an answer since the last piece.

    Attributes
    ----------
    text
        Of the answer.
    num_tokens
        Tokens of the answer since the last piece.
    finish_reason
        Why it ended; None before the last piece.
    said
        What kvrag says of the request on the server, with the last piece; None where it says
        nothing.
    num_cached
        Tokens of the prompt that the engine did not compute, by its own count, with the last piece.
    """

    text: str
    num_tokens: int = 0
    finish_reason: str | None = None
    said: Mapping[str, Any] | None = None
    num_cached: int = 0


class Transport(Protocol):
    """A way to one running engine. Safe to use from several threads."""

    def stream(self, request: EngineRequest) -> Iterator[Piece]:
        """Yield an answer piece by piece; whoever stops reading gives the request up.

        Raises
        ------
        EngineError
            When the engine refuses the request or cannot be reached.
        """
        ...
