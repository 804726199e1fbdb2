"""What benchmarks over random chunks share: an index of texts, room for a prompt, a clock."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from kvrag.arguments import shown
from kvrag.chunk import Document
from kvrag.errors import ParameterError
from kvrag.ingest.index import Index
from kvrag.models.kv_model import KVModel

Row = TypeVar("Row")

MEMORIES = ("none", "pinned", "card")
"""Where a prompt on a card may find chunks besides the store."""


@contextmanager
def temporary_index(
    model: KVModel, texts: Sequence[str], chunk_tokens: int, **options: Any
) -> Iterator[Index]:
    """Yield an index of one chunk for each text, which is deleted afterwards.

    Parameters
    ----------
    model, texts
        The model, and texts of at most `chunk_tokens` tokens.
    chunk_tokens
        The length of chunks.
    options
        Other options of `Index.create`; the codec is `raw` unless one is given.
    """
    with (
        tempfile.TemporaryDirectory(prefix="kvrag-bench-") as folder,
        Index.create(
            Path(folder) / "index",
            model=model,
            embedding="hashing",
            chunk_tokens=chunk_tokens,
            **{"codec": "raw"} | options,
        ) as index,
    ):
        index.add([Document(source=f"chunk-{i}", text=text) for i, text in enumerate(texts)])
        fit_codec(index)
        yield index


def fit_codec(index: Index) -> None:
    """Code the KV of an index that is too small for an ingestion to fit its codec to it."""
    if index.coding.needs_profile:
        index.upkeep.recode(index.config.codec)


def require_room(model: KVModel, num_tokens: int, remedy: str) -> None:
    """Raise ParameterError unless a prompt and its answer fit the model's window."""
    if num_tokens > model.max_positions:
        raise ParameterError(
            f"{num_tokens} tokens do not fit the {model.max_positions} of {model.name}: {remedy}"
        )


def require_one_thread(benchmark: str) -> None:
    """Raise ParameterError if processor time would add up several threads."""
    if torch.get_num_threads() > 1:
        raise ParameterError(
            f"bench {benchmark}: processor time adds up the {torch.get_num_threads()} threads; set "
            "OMP_NUM_THREADS=1"
        )


def measured(rows: Iterable[Row]) -> list[Row]:
    """Return rows; after an interrupt those that are there, if there are any."""
    found: list[Row] = []
    try:
        for row in rows:
            found.append(row)
    except KeyboardInterrupt:
        if not found:
            raise
    return found


def chosen_clock(processor_time: bool) -> Callable[[], float]:
    """Return the clock of the process's processor time, or that of the wall."""
    return time.process_time if processor_time else time.perf_counter


def room_in(memory: str) -> dict[str, int]:
    """Return the options of an engine that keeps chunks in one kind of memory, or in none.

    Raises
    ------
    ParameterError
        If `memory` is none of `MEMORIES`.
    """
    if memory not in MEMORIES:
        raise ParameterError(f"memory {shown(memory)}: expected one of {', '.join(MEMORIES)}")
    return {f"{one}_bytes": (memory == one) << 40 for one in MEMORIES[1:]}
