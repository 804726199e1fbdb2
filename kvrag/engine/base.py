"""What adapters and commands need of an engine, whoever computes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, Unpack

from kvrag.engine.answer import Answer, AnswerDelta
from kvrag.engine.request import Prompt, Request, RequestOptions
from kvrag.ingest.index import Index


class Engine(Protocol):
    """Answers prompts over an index.

    `kvrag.KVEngine` computes in this process, `kvrag.llms.vllm.engine.VLLMEngine` asks a vLLM. What
    a request wants and an engine cannot do raises ParameterError before anything is computed.
    """

    @property
    def index(self) -> Index:
        """Whose chunks are reused."""
        ...

    @property
    def defaults(self) -> Request:
        """What a request means where it says nothing."""
        ...

    @property
    def links_digest(self) -> str:
        """Digest of the link tokens put behind chunks, "" without any."""
        ...

    def generate(self, prompt: Prompt | Request, **options: Unpack[RequestOptions]) -> Answer:
        """Answer a prompt; see `kvrag.KVEngine.generate`."""
        ...

    def stream(
        self, prompt: Prompt | Request, **options: Unpack[RequestOptions]
    ) -> Iterator[AnswerDelta]:
        """Answer a prompt piece by piece; see `kvrag.KVEngine.stream`."""
        ...
