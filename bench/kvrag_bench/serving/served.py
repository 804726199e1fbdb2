"""An index of random text and a vLLM over it, in this process."""

from __future__ import annotations

import itertools
import os
import random
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvrag.chunk import Document
from kvrag.engine.answer import Answer
from kvrag.errors import ParameterError
from kvrag.ingest.index import Index
from kvrag.llms.vllm.engine import VLLMEngine, start_engine
from kvrag.llms.vllm.settings import ConnectorSettings
from kvrag.llms.vllm.transports import InProcess
from kvrag_bench.shapes import random_model, random_text

QUESTION_TOKENS = 24


@dataclass(frozen=True)
class ServingOptions:
    """Options of the served model and its workloads.

    Attributes
    ----------
    shape
        Shape of the random model, a name in `kvrag_bench.shapes.SHAPES`.
    context_tokens
        Tokens of the chunks in a prompt whose time to first token is measured.
    num_chunks
        Chunks they are spread over.
    repeats
        Timed runs, of which the median is reported; one more runs first and does not count.
    shuffled_queries, num_documents, documents_each, document_tokens
        Of the workloads in random order: queries, documents there are, documents in a prompt, and
        tokens of each.
    steady_queries
        Queries of the long run.
    workers
        Processes that share the model's heads; several keep each head of a record apart.
    """

    shape: str = "100m"
    context_tokens: Sequence[int] = (2000, 4000)
    num_chunks: int = 10
    repeats: int = 3
    shuffled_queries: int = 100
    num_documents: int = 10
    documents_each: int = 4
    document_tokens: int = 250
    steady_queries: int = 1000
    workers: int = 1

    def __post_init__(self) -> None:
        counts = (self.num_chunks, self.repeats, self.documents_each, self.document_tokens)
        if min(*counts, *self.context_tokens) < 1 or self.documents_each > self.num_documents:
            raise ParameterError(
                "bench vllm: counts are 1 or more, and a prompt holds no more documents than there "
                "are"
            )
        if self.steady_queries < 400 or self.shuffled_queries < 2:
            raise ParameterError("bench vllm: steady takes 400 queries at least, shuffled 2")


class Served:
    """A running engine over documents of random words.

    Parameters
    ----------
    index
        Index of the documents.
    transport
        The way to the engine.
    """

    def __init__(self, index: Index, transport: InProcess) -> None:
        self.index = index
        self.engine = VLLMEngine(index, lambda: transport)
        self.transport = transport

    def add(self, num_texts: int, num_tokens: int, name: str) -> list[str]:
        """Index texts of `num_tokens` each, one chunk for each text, and return them."""
        first = zlib.crc32(name.encode()) % 10_000  # seeds that other calls do not have
        texts = [
            random_text(self.index.model, num_tokens, seed=first * 1000 + number)
            for number in range(num_texts)
        ]
        self.index.add(
            [Document(source=f"{name}-{number}", text=text) for number, text in enumerate(texts)]
        )
        return texts

    def prompt(self, texts: Sequence[str], number: int = 0) -> str:
        """Return a prompt of the texts and a unique question."""
        question = random_text(self.index.model, QUESTION_TOKENS, seed=900_000 + number)
        return "\n\n".join([*texts, question])

    def ask(self, prompt: str, policy: str | None, *, is_fresh: bool = True) -> Answer:
        """Return the answer's first token; without a policy vLLM computes the prompt.

        Parameters
        ----------
        is_fresh
            Whether the engine forgets what it has cached before.
        """
        if is_fresh:
            self.transport.forget()
        return self.engine.generate(prompt, policy=policy, reuse=policy is not None, max_tokens=1)


def novel_orders(num_documents: int, documents_each: int, seed: int) -> Iterator[tuple[int, ...]]:
    """Yield choices of documents in an order that has not been yielded before, without end."""
    draw = random.Random(seed)
    seen: set[tuple[int, ...]] = set()
    for _ in itertools.count():
        order = tuple(draw.sample(range(num_documents), documents_each))
        if order not in seen:
            seen.add(order)
            yield order


@contextmanager
def serving(options: ServingOptions, say: Callable[[str], None]) -> Iterator[Served]:
    """Make model, index and engine, in a temporary folder.

    Raises
    ------
    EngineVersionError
        When vLLM is not installed, or of a version that was not tested.
    """
    # Memory is measured, and the cache emptied, in this process.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # By default vLLM writes its log where the figures go.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    with tempfile.TemporaryDirectory(prefix="kvrag-bench-") as scratch:
        folder = Path(scratch)
        say("making the model")
        model = random_model(options.shape)
        model.hf.save_pretrained(folder / "model")
        model.tokenizer.save_pretrained(folder / "model")
        longest = max(options.document_tokens, max(options.context_tokens) // options.num_chunks)
        with Index.create(
            folder / "index",
            model=folder / "model",
            dtype="float32",
            embedding="hashing",
            chunk_tokens=longest,
            codec="raw" if options.workers == 1 else "raw-heads",
        ) as index:
            del model
            say("starting vLLM")
            settings = ConnectorSettings(str(folder / "index"))
            arguments = {"enforce_eager": True, "max_num_seqs": 8, "disable_log_stats": True}
            if options.workers > 1:
                # By itself, vLLM's CPU build gives each worker a separate memory node.
                os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
                arguments["tensor_parallel_size"] = options.workers
            transport = start_engine(settings, arguments)
            yield Served(index, transport)
