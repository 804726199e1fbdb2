"""Packets: chunks of some documents, as rows of an Arrow table that travels between machines.

A packet holds about as many tokens as one call of an actor computes. A long document is spread over
several packets. Ids and contexts are packed as in the catalog; nothing of a packet is pickled.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from kvrag.chunk import Chunk
from kvrag.ingest.computing import Outcome
from kvrag.ingest.plan import PlannedDocument
from kvrag.ingest.rows import (
    FileState,
    pack_contexts,
    pack_ids,
    pack_json,
    unpack_chunk,
)

_CHUNK = pa.struct(
    [
        ("chunk_id", pa.string()),
        ("text", pa.large_string()),
        ("token_ids", pa.binary()),
        ("token_starts", pa.binary()),
        ("ordinal", pa.int64()),
        ("metadata", pa.string()),
        ("contexts", pa.int32()),
        ("vectors", pa.binary()),
    ]
)
_SCHEMA = pa.schema(
    [
        ("head", pa.large_string()),
        ("chunks", pa.list_(_CHUNK)),
        ("contexts", pa.list_(pa.binary())),
    ]
)


@dataclass
class Part:
    """Chunks of one document; the document's last ones may be in a later packet.

    Attributes
    ----------
    planned
        The document, without its text.
    is_known
        Whether an older version is indexed.
    control_strings
        Number of control strings in the document that were read as text.
    chunks
        Its chunks in this packet, in order.
    vectors
        Their vectors ``[num_windows, dim]``, once they are embedded.
    reason
        Why one of them cannot be indexed; "" if all can.
    """

    planned: PlannedDocument
    is_known: bool
    control_strings: int
    chunks: list[Chunk]
    vectors: list[NDArray[np.float32]] = field(default_factory=list)
    reason: str = ""


@dataclass
class News:
    """What planning found beside documents to write; the lists are those of `Plan`.

    Attributes
    ----------
    missing
        In a dry run: tokens of the KV that the store lacks, and of its context, by key.
    """

    removed: list[str] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)
    gone_files: list[str] = field(default_factory=list)
    touched: list[FileState] = field(default_factory=list)
    missing: dict[str, tuple[int, int]] = field(default_factory=dict)


@dataclass
class Packet:
    """The work of one call of an actor.

    Attributes
    ----------
    outcome
        What was computed for it.
    stored
        Name of KV that was stored for it, the last; "" if nothing was.
    cpu_seconds
        Processor time of the processes that handled it, all of their threads.
    """

    parts: list[Part] = field(default_factory=list)
    news: News = field(default_factory=News)
    outcome: Outcome = field(default_factory=Outcome)
    stored: str = ""
    cpu_seconds: float = 0.0

    def chunks(self) -> Iterator[Chunk]:
        """Yield the chunks of all parts."""
        for part in self.parts:
            yield from part.chunks


def against_second(source: str) -> str:
    """Return the reason against a row whose source an earlier one has."""
    return (
        f"{source}: an earlier row has the same source and is used instead; give each row a "
        "different one"
    )


def pack(packet: Packet, dim: int) -> pa.Table:
    """Return a packet as a table of one row; vectors have `dim` dimensions."""
    contexts: dict[bytes, int] = {}
    chunks: list[dict[str, Any]] = []
    heads = []
    for part in packet.parts:
        planned = part.planned
        heads.append(
            {
                "source": planned.source,
                "digest": planned.digest,
                "metadata": planned.metadata,
                "file": None if planned.file is None else asdict(planned.file),
                "is_last_of_file": planned.is_last_of_file,
                "num_chunks": planned.num_chunks,
                "num_tokens": planned.num_tokens,
                "is_known": part.is_known,
                "control_strings": part.control_strings,
                "reason": part.reason,
                "num_here": len(part.chunks),
            }
        )
        for number, chunk in enumerate(part.chunks):
            packed = pack_contexts(chunk.contexts)
            vectors = part.vectors[number].astype("<f4").tobytes() if part.vectors else None
            chunks.append(
                {
                    "chunk_id": chunk.chunk_id,
                    "text": chunk.text,
                    "token_ids": pack_ids(chunk.token_ids),
                    "token_starts": pack_ids(chunk.token_starts),
                    "ordinal": chunk.ordinal,
                    "metadata": pack_json(chunk.metadata),
                    "contexts": contexts.setdefault(packed, len(contexts)),
                    "vectors": vectors,
                }
            )
    head = {
        "parts": heads,
        "news": asdict(packet.news),
        "outcome": asdict(packet.outcome),
        "stored": packet.stored,
        "cpu_seconds": packet.cpu_seconds,
        "dim": dim,
    }
    row = {"head": json.dumps(head), "chunks": chunks, "contexts": list(contexts)}
    return pa.Table.from_pylist([row], schema=_SCHEMA)


def unpack(table: pa.Table) -> Iterator[Packet]:
    """Yield the packets of a table, in order."""
    for row in table.to_pylist():
        head = json.loads(row["head"])
        packet = Packet(
            news=_news(head["news"]),
            outcome=Outcome(**head["outcome"]),
            stored=head["stored"],
            cpu_seconds=head["cpu_seconds"],
        )
        rows = iter(row["chunks"])
        for one in head["parts"]:
            packet.parts.append(_part(one, rows, row["contexts"], head["dim"]))
        yield packet


def _part(
    head: dict[str, Any], rows: Iterator[dict[str, Any]], contexts: list[bytes], dim: int
) -> Part:
    state = head["file"]
    planned = PlannedDocument(
        source=head["source"],
        digest=head["digest"],
        metadata=head["metadata"],
        file=None if state is None else FileState(**state),
        is_last_of_file=head["is_last_of_file"],
        document=None,
        chunks=None,
        num_chunks=head["num_chunks"],
        num_tokens=head["num_tokens"],
    )
    part = Part(planned, head["is_known"], head["control_strings"], [])
    part.reason = head["reason"]
    for row in (next(rows) for _ in range(head["num_here"])):
        part.chunks.append(
            unpack_chunk(
                (
                    *(row[name] for name in ("chunk_id", "text", "token_ids", "token_starts")),
                    planned.source,
                    row["ordinal"],
                    row["metadata"],
                    contexts[row["contexts"]],
                )
            )
        )
        if row["vectors"] is not None:
            part.vectors.append(np.frombuffer(row["vectors"], "<f4").reshape(-1, dim))
    return part


def _news(values: Mapping[str, Any]) -> News:
    news = News(**values)
    news.failed = [(source, reason) for source, reason in values["failed"]]
    news.touched = [FileState(**state) for state in values["touched"]]
    news.missing = {key: (own, before) for key, (own, before) in values["missing"].items()}
    return news


def split(parts: Iterable[Part], batch_tokens: int) -> Iterator[list[Part]]:
    """Yield the parts in groups of about `batch_tokens` tokens; cuts parts that are longer."""
    group: list[Part] = []
    room = batch_tokens
    for part in parts:
        rest = part.chunks
        is_first = True
        while rest or is_first:
            taken = 0
            while taken < len(rest) and room > 0:
                room -= len(rest[taken].token_ids)
                taken += 1
            group.append(replace(part, chunks=rest[:taken]))
            rest, is_first = rest[taken:], False
            if room <= 0:
                yield group
                group, room = [], batch_tokens
    if group:
        yield group
