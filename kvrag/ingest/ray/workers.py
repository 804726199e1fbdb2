"""What every process of a cluster has to know, and the actors that embed and encode packets."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa

from kvrag.chunk import Chunk, ChunkKey
from kvrag.codec.base import Codec
from kvrag.codec.profile import Profile
from kvrag.codec.registry import get_codec
from kvrag.ingest.config import IndexConfig
from kvrag.ingest.contexts import SIMILAR
from kvrag.ingest.encoders import Encoders
from kvrag.ingest.limits import ParseLimits
from kvrag.ingest.parsing import Parser
from kvrag.ingest.ray.packets import Packet, pack, unpack
from kvrag.ingest.stages import BackgroundWriter, RecordMaker, embed, lacking, refuse
from kvrag.store.base import Store
from kvrag.store.registry import open_store

MAX_ENDS = 3
"""How often a process may end while it computes one chunk, before the chunk is refused."""


@dataclass(frozen=True)
class Job:
    """The settings of an ingestion, as plain values that travel to other machines.

    Attributes
    ----------
    folder
        The index folder, for messages; other machines need not have it.
    config
        The settings of the index.
    model, device
        Where to load the model from, and where it runs (`Index.open`).
    store
        URL of the store of KV.
    codec, profile
        Name of the codec of new records, and the content of its profile; b"" for none.
    limits, loaders
        How to read files (`Index.add`).
    force, dry_run
        As in `Run`.
    batch_tokens, cpus
        As in `RayOptions`.
    """

    folder: str
    config: IndexConfig
    model: str
    device: str | None
    store: str
    codec: str
    profile: bytes
    limits: ParseLimits
    loaders: tuple[tuple[str, str], ...]
    force: bool
    dry_run: bool
    batch_tokens: int
    cpus: float

    @property
    def is_similar(self) -> bool:
        """Whether chunks are encoded only once all are embedded, each after its nearest."""
        return self.config.context == SIMILAR

    @cached_property
    def encoders(self) -> Encoders:
        """The models of the index, each loaded on first use."""
        return Encoders(
            Path(self.folder), self.config, model=self.model, embedding=None, device=self.device
        )

    def open_store(self) -> Store:
        """Open the store of KV; of tiers only the last one, which all machines share.

        Raises as `kvrag.store.registry.open_store` does.
        """
        url = self.store
        return open_store(url.rpartition("|")[2] if url.startswith("tiered:") else url)

    def open_codec(self) -> Codec:
        """Return the codec of new records."""
        return get_codec(self.codec, Profile.from_bytes(self.profile) if self.profile else None)

    def parser(self) -> Parser:
        """Return a parser of files."""
        return Parser(self.limits, dict(self.loaders))


class Attempts:
    """Counts how often something was begun without an end: an actor of Ray, for all others."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def begin(self, name: str) -> int:
        """Return how often it was begun before."""
        before = self._counts.get(name, 0)
        self._counts[name] = before + 1
        return before

    def end(self, name: str) -> None:
        """Forget it."""
        self._counts.pop(name, None)


class Encoder:
    """Embeds packets' chunks, computes their KV and stores it, unless it is stored already.

    With context ``similar``, planning embeds them.

    Parameters
    ----------
    job
        The settings.
    begin, end
        The methods of `Attempts`. If a process ended while it computed a packet, the next one
        computes it chunk by chunk, and refuses a chunk that ended several.
    """

    def __init__(self, job: Job, begin: Callable[[str], int], end: Callable[[str], None]) -> None:
        import torch

        torch.set_num_threads(max(1, int(job.cpus)))
        self._job = job
        self._begin, self._end = begin, end
        self._store = job.open_store()
        self._codec = job.open_codec()
        self._prefill = job.encoders.prefill
        _ = job.encoders.model

    def __call__(self, table: pa.Table) -> pa.Table:
        """Return the packets of a table, with what was done and what cannot be computed."""
        return pa.concat_tables([self._encoded(packet) for packet in unpack(table)])

    def _encoded(self, packet: Packet) -> pa.Table:
        started = time.process_time()
        maker = RecordMaker(self._store, self._prefill, packet.outcome)
        maker.codec = self._codec
        documents = packet.plan.documents
        sound = (one for one in documents if one.chunks and not one.reason)
        name = next((one.chunks[0].chunk_id for one in sound), "")
        is_careful = bool(name) and self._begin(name) > 0
        if not self._job.is_similar:
            embed(self._job.encoders.embedding, documents)
        bad: dict[ChunkKey, str] = {}
        # Others may have stored some of it since it was planned.
        missing = lacking(
            documents, self._job.config.key_of, self._store, by_context=self._job.is_similar
        )
        with BackgroundWriter() as writer:
            for key, chunk in missing:
                if is_careful:
                    self._make_alone(key, chunk, maker, bad)
                else:
                    maker.make(key, chunk, writer, bad)
        # The last task has ended only now.
        packet.stored = next((key.digest for key, _ in reversed(missing) if key not in bad), "")
        if name:
            self._end(name)
        refuse(documents, self._job.config.key_of, bad)
        packet.cpu_seconds += time.process_time() - started
        return pack(packet, self._job.config.embedding_dim)

    def _make_alone(
        self, key: ChunkKey, chunk: Chunk, maker: RecordMaker, bad: dict[ChunkKey, str]
    ) -> None:
        if self._begin(key.digest) >= MAX_ENDS:
            bad[key] = (
                f"the process that computes chunk {chunk.ordinal} ended {MAX_ENDS} times while it "
                "did so; look at the logs of Ray, and split or leave out the document"
            )
            return
        with BackgroundWriter() as writer:
            maker.make(key, chunk, writer, bad)
        self._end(key.digest)


def remote_attempts(actor: Any) -> tuple[Callable[[str], int], Callable[[str], None]]:
    """Return the methods of an `Attempts` actor; one that is gone has counted nothing."""
    import ray

    def begin(name: str) -> int:
        try:
            return int(ray.get(actor.begin.remote(name)))
        except ray.exceptions.RayActorError:
            return 0

    def end(name: str) -> None:
        actor.end.remote(name)

    return begin, end


class RemoteEncoder(Encoder):
    """An `Encoder` that counts in an `Attempts` actor."""

    def __init__(self, job: Job, attempts: Any) -> None:
        super().__init__(job, *remote_attempts(attempts))
