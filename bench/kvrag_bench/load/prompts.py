"""An index of random chunks in memory, and a prompt of all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kvrag.errors import ParameterError
from kvrag.ingest.index import Index
from kvrag_bench.setting import temporary_index
from kvrag_bench.shapes import chosen_model, random_text


@dataclass(frozen=True)
class LoadPrompt:
    """What is loaded.

    Attributes
    ----------
    model
        A model folder or name; None takes random weights of `shape`.
    shape
        A name in `kvrag_bench.shapes.SHAPES`.
    num_chunks, chunk_tokens, question_tokens
        Chunks of the prompt, the tokens of each, and those of the question.
    codec
        How the chunks are stored.
    """

    model: str | None = None
    shape: str = "qwen2.5-0.5b"
    num_chunks: int = 6
    chunk_tokens: int = 250
    question_tokens: int = 30
    codec: str = "raw"

    def __post_init__(self) -> None:
        if min(self.num_chunks, self.chunk_tokens, self.question_tokens) < 1:
            raise ParameterError("bench load: chunks and tokens must be 1 or more")


def check_speeds(gigabytes_per_second: Sequence[float]) -> None:
    """Raise ParameterError unless there are speeds of a store, all above 0."""
    if not gigabytes_per_second or min(gigabytes_per_second) <= 0:
        raise ParameterError("bench load: speeds must be above 0 GB/s, one at least")


@contextmanager
def indexed(options: LoadPrompt, say: Callable[[str], None]) -> Iterator[tuple[Index, str]]:
    """Yield an index whose KV is in memory, and the prompt."""
    say("loading the model")
    model = chosen_model(options.model, options.shape)
    num_tokens, seed = options.chunk_tokens, options.chunk_tokens * 1000
    texts = [random_text(model, num_tokens, seed=seed + i) for i in range(options.num_chunks)]
    say(f"indexing {options.num_chunks} chunks of {num_tokens} tokens")
    with temporary_index(model, texts, num_tokens, codec=options.codec, store="memory:") as index:
        question = random_text(model, options.question_tokens, seed=num_tokens)
        yield index, "\n\n".join([*texts, question])
