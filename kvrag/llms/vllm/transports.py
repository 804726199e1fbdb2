"""The interface for sending prompts to vLLM and receiving answers piece by piece."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from kvrag.engine.options import Sampling


@dataclass(frozen=True)
class EngineRequest:
    """One prompt and the options for answering it.

    Attributes
    ----------
    token_ids
        The prompt's token ids.
    params
        The request's ``kv_transfer_params`` (`kvrag.llms.vllm.settings.RequestParams`).
    max_tokens, sampling, stop
        See `kvrag.engine.request.Request`.
    ignore_end
        Whether the answer continues after an end-of-text token.
    route
        The prompt's key for a proxy before several servers (`kvrag.engine.routing`).
    is_streamed
        Whether to send pieces as they are generated; a server sends kvrag's report only with a
        whole answer.
    """

    token_ids: Sequence[int]
    params: Mapping[str, Any]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop: Sequence[str] = ()
    ignore_end: bool = False
    route: str = ""
    is_streamed: bool = True

    def sampling_values(self) -> dict[str, Any]:
        """Return the sampling parameters, with the names that vLLM and its server share."""
        return {
            **asdict(self.sampling),
            "max_tokens": self.max_tokens,
            "stop": list(self.stop),
            "ignore_eos": self.ignore_end,
        }


@dataclass(frozen=True)
class Piece:
    """A piece of a streamed answer.

    Attributes
    ----------
    text
        The answer's text since the last piece.
    num_tokens
        The answer's tokens since the last piece.
    finish_reason
        Why the answer ended; None before the last piece.
    said
        kvrag's part of the server's response, with the last piece; None if there is none.
    num_cached
        Prompt tokens that the engine did not compute, by its own count, with the last piece.
    """

    text: str
    num_tokens: int = 0
    finish_reason: str | None = None
    said: Mapping[str, Any] | None = None
    num_cached: int = 0


class Transport(Protocol):
    """A connection to one running engine. You can use it from several threads."""

    def stream(self, request: EngineRequest) -> Iterator[Piece]:
        """Yield an answer piece by piece; closing the iterator aborts the request.

        Raises
        ------
        EngineError
            If the engine refuses the request or cannot be reached.
        """
        ...
