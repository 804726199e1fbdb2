"""What an ingestion on Ray Data is asked to use, and the bytes that it will make."""

from __future__ import annotations

from dataclasses import dataclass

from kvrag import arguments
from kvrag.codec.names import LEVELS, RAW, expected_bytes_per_token, parse_codec
from kvrag.ingest.config import DTYPE_BYTES, IndexConfig
from kvrag.optiontable import check_options, described, option


@described
@dataclass(frozen=True)
class RayOptions:
    """How an ingestion uses a cluster. Values that cannot be used are refused at once."""

    address: str | None = option(
        None,
        "Address of the cluster (``HOST:PORT``, ``auto``, ``local``); None leaves the choice to "
        "Ray: the cluster in ``RAY_ADDRESS`` or on this machine, or else a new one on this "
        "machine. A cluster that the caller has connected to is used as it is.",
    )
    min_actors: int = option(1, "Processes that compute KV, at least.", least=1, most=100_000)
    max_actors: int | None = option(
        None,
        "Processes that compute KV, at most; by default as many as the cluster has room for.",
        least=1,
        most=100_000,
    )
    cpus: float = option(
        1.0,
        "Processors that each of them takes. On a CPU, it computes with that many threads.",
        above=0,
    )
    gpus: float = option(0.0, "Graphics cards that each of them takes.", least=0, most=64)
    batch_tokens: int = option(
        8192,
        "Tokens of a packet: the work of one call, and what a lost process computes again at most.",
        least=1,
        most=1 << 24,
    )
    store_bytes: int | None = option(
        None,
        "Most bytes that wait between the stages, in Ray's object store; by default Ray's own "
        "limit.",
        least=1 << 20,
        most=1 << 50,
    )
    store: str | None = option(
        None,
        "URL of the store of KV with its password, as all machines can open it; None means the "
        "recorded one.",
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.max_actors is not None:
            arguments.whole(self.max_actors, "max_actors", self.min_actors)


def size_by_codec(num_tokens: int, config: IndexConfig) -> dict[str, int]:
    """Return the bytes of the records of some tokens by codec; rather too many than too few."""
    names = [RAW] + [
        parse_codec(preset if len(levels) == 1 else f"{preset}:{level}").label
        for preset, levels in LEVELS.items()
        for level in levels
    ]
    size = DTYPE_BYTES[config.dtype]
    return {
        name: num_tokens * expected_bytes_per_token(name, config.bytes_per_token, size)
        for name in names
    }
