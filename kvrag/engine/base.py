"""The interface of an engine, as adapters and commands use it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from typing import Any, Literal, Protocol

from kvrag.engine.answer import Answer, AnswerDelta
from kvrag.engine.request import Prompt, Request
from kvrag.ingest.index import Index

# The key by which a proxy sends prompts with the same chunks to the same replica.


ROUTE_HEADER = "X-KVRag-Route"
"""The HTTP header that carries the key."""


def route_key(chunk_ids: Iterable[str]) -> str:
    """Return the key of a prompt: its smallest chunk id, or "" without chunks.

    Ids are digests. So two prompts have the same key about as often as the share of chunks that
    they have in common (MinHash), whatever the order.

    Parameters
    ----------
    chunk_ids
        Ids of the chunks in the prompt.
    """
    return min(chunk_ids, default="")


class Engine(Protocol):
    """Answers prompts over an index.

    `kvrag.KVEngine` computes in this process; `kvrag.llms.vllm.engine.VLLMEngine` asks a vLLM. An
    engine that cannot do what a request asks for raises ParameterError before it computes anything.
    """

    @property
    def index(self) -> Index:
        """The index whose chunks are reused."""

    @property
    def defaults(self) -> Request:
        """The values that apply where a request sets none."""

    @property
    def links_digest(self) -> str:
        """Digest of the link tokens that follow chunks, or "" without link tokens."""

    def generate(self, prompt: Prompt | Request, **options: Any) -> Answer:
        """Answer a prompt; see `kvrag.KVEngine.generate`."""

    def stream(self, prompt: Prompt | Request, **options: Any) -> Iterator[AnswerDelta]:
        """Answer a prompt piece by piece; see `kvrag.KVEngine.stream`."""

    def generate_batch(
        self,
        prompts: Sequence[Prompt | Request],
        *,
        return_exceptions: Literal[True],
        **options: Any,
    ) -> list[Answer | Exception]:
        """Answer several prompts together; see `kvrag.KVEngine.generate_batch`."""

    def astream(
        self, prompt: Prompt | Request, **options: Any
    ) -> AsyncGenerator[AnswerDelta, None]:
        """Answer a prompt while the event loop runs on; see `kvrag.KVEngine.astream`."""
