"""Packets: chunks of some documents, as rows of an Arrow table that travels between machines.

A packet holds about as many tokens as one call of an actor computes. A long document is spread over
several packets. Ids and contexts are packed as in the catalog; nothing of a packet is pickled.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa

from kvrag.ingest.plan import Plan, PlannedDocument
from kvrag.ingest.report import FailedDocument
from kvrag.ingest.rows import FileState, pack_contexts, pack_ids, pack_json, unpack_chunk
from kvrag.ingest.stages import Outcome

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
class Packet:
    """The work of one call of an actor.

    Attributes
    ----------
    plan
        The documents with their chunks, of which the last one's other chunks may be in a later
        packet; and what planning found beside them. The collector counts documents once.
    outcome
        What was computed for it.
    stored
        Name of KV that was stored for it, the last; "" if nothing was.
    cpu_seconds
        Processor time of the processes that handled it, all of their threads.
    """

    plan: Plan = field(default_factory=Plan)
    outcome: Outcome = field(default_factory=Outcome)
    stored: str = ""
    cpu_seconds: float = 0.0


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
    documents = packet.plan.documents
    for document in documents:
        for number, chunk in enumerate(document.chunks):
            packed = pack_contexts(chunk.contexts)
            vectors = document.vectors[number] if document.vectors else None
            chunks.append(
                {
                    "chunk_id": chunk.chunk_id,
                    "text": chunk.text,
                    "token_ids": pack_ids(chunk.token_ids),
                    "token_starts": pack_ids(chunk.token_starts),
                    "ordinal": chunk.ordinal,
                    "metadata": pack_json(chunk.metadata),
                    "contexts": contexts.setdefault(packed, len(contexts)),
                    "vectors": None if vectors is None else vectors.astype("<f4").tobytes(),
                }
            )
    bare = [replace(one, document=None, chunks=[], vectors=[]) for one in documents]
    head = asdict(replace(packet, plan=replace(packet.plan, documents=bare)))
    head |= {"num_here": [len(one.chunks) for one in documents], "dim": dim}
    row = {"head": json.dumps(head), "chunks": chunks, "contexts": list(contexts)}
    return pa.Table.from_pylist([row], schema=_SCHEMA)


def unpack(table: pa.Table) -> Iterator[Packet]:
    """Yield the packets of a table, in order."""
    for row in table.to_pylist():
        head = json.loads(row["head"])
        numbers, dim = head.pop("num_here"), head.pop("dim")
        told = head.pop("plan")
        told["failed"] = [FailedDocument(**one) for one in told["failed"]]
        told["touched"] = [FileState(**one) for one in told["touched"]]
        told["missing"] = {key: (own, before) for key, (own, before) in told["missing"].items()}
        rows = iter(row["chunks"])
        documents = []
        for number, one in zip(numbers, told.pop("documents"), strict=True):
            file = one.pop("file")
            document = PlannedDocument(**one, file=None if file is None else FileState(**file))
            _fill(document, itertools.islice(rows, number), row["contexts"], dim)
            documents.append(document)
        plan = Plan(documents, **told)
        yield Packet(plan, Outcome(**head.pop("outcome")), **head)


def _fill(
    document: PlannedDocument, rows: Iterable[dict[str, Any]], contexts: list[bytes], dim: int
) -> None:
    """Give a document its chunks and their vectors."""
    for row in rows:
        texts = (row[name] for name in ("chunk_id", "text", "token_ids", "token_starts"))
        place = (document.source, row["ordinal"], row["metadata"], contexts[row["contexts"]])
        document.chunks.append(unpack_chunk((*texts, *place)))
        if row["vectors"] is not None:
            document.vectors.append(np.frombuffer(row["vectors"], "<f4").reshape(-1, dim))


def split(
    documents: Iterable[PlannedDocument], batch_tokens: int
) -> Iterator[list[PlannedDocument]]:
    """Yield documents in groups of about `batch_tokens` tokens; cuts those that are longer."""
    group: list[PlannedDocument] = []
    room = batch_tokens
    for document in documents:
        rest = document.chunks
        is_first = True
        while rest or is_first:
            taken = 0
            while taken < len(rest) and room > 0:
                room -= len(rest[taken].token_ids)
                taken += 1
            group.append(replace(document, chunks=rest[:taken]))
            rest, is_first = rest[taken:], False
            if room <= 0:
                yield group
                group, room = [], batch_tokens
    if group:
        yield group
