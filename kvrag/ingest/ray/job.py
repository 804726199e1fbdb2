"""What every process of a cluster needs to know of an index."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from kvrag.chunk import Chunk, ChunkKey
from kvrag.codec.base import Codec
from kvrag.codec.profile import Profile
from kvrag.codec.registry import get_codec
from kvrag.fusion.compression.spec import parse_compression
from kvrag.ingest.config import IndexConfig
from kvrag.ingest.encoders import Encoders
from kvrag.ingest.limits import ParseLimits
from kvrag.ingest.parsing import Parser
from kvrag.ingest.storage import key_of
from kvrag.store.base import Store
from kvrag.store.registry import open_store


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

    def key_of(self, chunk: Chunk) -> ChunkKey:
        """Return the name of a chunk's KV, the first of several."""
        return key_of(self.config, parse_compression(self.config.compression), chunk)
