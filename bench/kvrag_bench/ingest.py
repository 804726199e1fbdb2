"""`kvrag bench ingest`: indexing throughput against the model's own batched prefill, in one run."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch

from kvrag.chunk import Document
from kvrag.errors import ParameterError
from kvrag.ingest.contexts import NO_CONTEXT, parse_context
from kvrag.ingest.index import Index
from kvrag.ingest.report import IngestReport
from kvrag.models.kv_model import KVModel
from kvrag_bench.shapes import chosen_model, random_text


@dataclass(frozen=True)
class IngestOptions:
    """What to measure.

    Attributes
    ----------
    model
        A model folder or name; None takes random weights of `shape`.
    shape
        A name in `kvrag_bench.shapes.SHAPES`.
    num_chunks
        Chunks indexed, of the lengths in `chunk_tokens` in turn.
    chunk_tokens
        Tokens a chunk.
    batch_sizes
        Chunks a batch of full prefill; the best counts.
    repeats
        Timed runs, of which the median is reported; one more runs first and does not count.
    contexts
        What chunks are encoded after (`kvrag.ingest.contexts`), a row for each.
    """

    model: str | None = None
    shape: str = "qwen2.5-0.5b"
    num_chunks: int = 12
    chunk_tokens: Sequence[int] = (100, 250, 500)
    batch_sizes: Sequence[int] = (1, 2, 4, 8)
    repeats: int = 3
    contexts: Sequence[str] = (NO_CONTEXT,)

    def __post_init__(self) -> None:
        counts = (self.num_chunks, self.repeats, *self.chunk_tokens, *self.batch_sizes)
        if not self.chunk_tokens or not self.batch_sizes or min(counts) < 1:
            raise ParameterError("bench ingest: chunks, tokens, batches and repeats are 1 or more")
        for context in self.contexts:
            parse_context(context)


@dataclass(frozen=True)
class IngestRow:
    """The throughput of indexing, in tokens of the chunks.

    Attributes
    ----------
    ingest_tokens_per_second
        `Index.add` whole: chunking, embedding, prefill, encoding, durable writes, catalog.
    prefill_tokens_per_second, prefill_batch_size
        Plain Transformers' forward over the same chunks, sorted by length and padded, at the
        batch size that was best.
    share
        The first over the second.
    bytes_per_token
        Bytes of the stored records, for each token of the chunks.
    """

    model: str
    context: str
    num_chunks: int
    num_tokens: int
    ingest_tokens_per_second: float
    prefill_tokens_per_second: float
    prefill_batch_size: int
    share: float
    bytes_per_token: float


def run_ingest_bench(
    options: IngestOptions, on_progress: Callable[[str], None] | None = None
) -> list[IngestRow]:
    """Measure all of them, taking turns so that a machine that drifts does so for each."""
    say = on_progress or (lambda _: None)
    say("loading the model")
    model = chosen_model(options.model, options.shape)
    lengths = [
        options.chunk_tokens[i % len(options.chunk_tokens)] for i in range(options.num_chunks)
    ]
    texts = [random_text(model, length, seed=i) for i, length in enumerate(lengths)]
    ingest: dict[str, list[IngestReport]] = {context: [] for context in options.contexts}
    prefill: dict[int, list[float]] = {size: [] for size in options.batch_sizes}
    for run in range(options.repeats + 1):
        say(f"run {run} of {options.repeats}" + (", not counted" if run == 0 else ""))
        for context, reports in ingest.items():
            reports.append(_ingested(model, texts, context))
        for size, seconds in prefill.items():
            seconds.append(_prefill_seconds(model, texts, size))
    best = min(options.batch_sizes, key=lambda size: median(prefill[size][1:]))
    num_tokens = sum(lengths)
    prefill_rate = num_tokens / median(prefill[best][1:])
    rates = {
        context: num_tokens / median(report.seconds for report in reports[1:])
        for context, reports in ingest.items()
    }
    return [
        IngestRow(
            model=model.name,
            context=context,
            num_chunks=options.num_chunks,
            num_tokens=num_tokens,
            ingest_tokens_per_second=rate,
            prefill_tokens_per_second=prefill_rate,
            prefill_batch_size=best,
            share=rate / prefill_rate,
            bytes_per_token=ingest[context][0].size_bytes / num_tokens,
        )
        for context, rate in rates.items()
    ]


def _ingested(model: KVModel, texts: Sequence[str], context: str) -> IngestReport:
    """Index the texts; the report's seconds are those of the whole call."""
    longest = max(len(model.tokenizer(text)["input_ids"]) for text in texts)
    documents = [Document(source=str(i), text=text) for i, text in enumerate(texts)]
    with (
        tempfile.TemporaryDirectory(prefix="kvrag-bench-") as folder,
        Index.create(
            Path(folder) / "index",
            model=model,
            embedding="hashing",
            chunk_tokens=longest,
            context=context,
        ) as index,
    ):
        started = time.perf_counter()
        report = index.add(documents)
        return replace(report, seconds=time.perf_counter() - started)


def _prefill_seconds(model: KVModel, texts: Sequence[str], batch_size: int) -> float:
    """Return the wall time of plain padded forwards, the output projection left out."""
    ids = sorted((model.tokenizer(text)["input_ids"] for text in texts), key=len)
    started = time.perf_counter()
    for batch in _batches(ids, batch_size):
        width = max(len(row) for row in batch)
        padded = torch.tensor([row + [0] * (width - len(row)) for row in batch])
        with model.lock, torch.no_grad():
            model.hf.base_model(input_ids=padded.to(model.device), use_cache=True)
    return time.perf_counter() - started


def _batches(rows: list[list[int]], size: int) -> Iterator[list[list[int]]]:
    for begin in range(0, len(rows), size):
        yield rows[begin : begin + size]
