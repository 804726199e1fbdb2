"""What an ingestion on Ray Data is asked to use, and what it will take."""

from __future__ import annotations

from dataclasses import dataclass

from kvrag import arguments
from kvrag.arguments import shown
from kvrag.codec.names import LEVELS, RAW, expected_bytes_per_token, parse_codec
from kvrag.errors import ParameterError
from kvrag.ingest.config import DTYPE_BYTES, IndexConfig


@dataclass(frozen=True)
class RayOptions:
    """How an ingestion uses a cluster. Values that cannot be used are refused at once.

    Attributes
    ----------
    address
        Address of the cluster (``HOST:PORT``, ``auto``, ``local``); None leaves the choice to Ray:
        the cluster in ``RAY_ADDRESS`` or on this machine, or else a new one on this machine. A
        cluster that the caller has connected to is used as it is.
    min_actors, max_actors
        Processes that compute KV, at least and at most; None is as many as the cluster has room
        for.
    cpus, gpus
        Processors and graphics cards that each of them takes. On a CPU, it computes with that many
        threads.
    batch_tokens
        Tokens of a packet: the work of one call, and what a lost process computes again at most.
    store_bytes
        Limit on what waits between the stages, in Ray's object store; None is Ray's own.
    store
        URL of the store of KV with its password, as all machines can open it; None means the
        recorded one.
    """

    address: str | None = None
    min_actors: int = 1
    max_actors: int | None = None
    cpus: float = 1.0
    gpus: float = 0.0
    batch_tokens: int = 8192
    store_bytes: int | None = None
    store: str | None = None

    def __post_init__(self) -> None:
        arguments.whole(self.min_actors, "min_actors", 1, 100_000)
        if self.max_actors is not None:
            arguments.whole(self.max_actors, "max_actors", self.min_actors, 100_000)
        arguments.number(self.cpus, "cpus", above=0.0)
        if not isinstance(self.gpus, int | float) or not 0 <= self.gpus <= 64:
            raise ParameterError(f"gpus {shown(self.gpus)}: expected a number from 0 to 64")
        arguments.whole(self.batch_tokens, "batch_tokens", 1, 1 << 24)
        if self.store_bytes is not None:
            arguments.whole(self.store_bytes, "store_bytes", 1 << 20, 1 << 50)


@dataclass(frozen=True)
class Estimate:
    """What an ingestion will take.

    Attributes
    ----------
    num_tokens
        Tokens to compute: the chunks, and what each is encoded after.
    size_bytes
        Bytes of the records by codec; rather too many than too few.
    hours
        Wall time; None without a rate.
    price
        Money, in the currency of the given price; None without a rate or a price.
    """

    num_tokens: int
    size_bytes: dict[str, int]
    hours: float | None
    price: float | None


def estimate(
    num_tokens: int,
    num_context_tokens: int,
    config: IndexConfig,
    *,
    num_actors: int,
    rate: float | None,
    price_per_hour: float | None,
) -> Estimate:
    """Return what computing some tokens will take.

    Parameters
    ----------
    num_tokens, num_context_tokens
        Tokens of the records to make, and of what is computed before them but not stored.
    config
        The settings of the index.
    num_actors
        Processes that compute at once.
    rate
        Tokens that one of them computes in a second.
    price_per_hour
        What one of them costs in an hour.
    """
    names = [RAW] + [
        parse_codec(preset if len(levels) == 1 else f"{preset}:{level}").label
        for preset, levels in LEVELS.items()
        for level in levels
    ]
    size = DTYPE_BYTES[config.dtype]
    sizes = {
        name: num_tokens * expected_bytes_per_token(name, config.bytes_per_token, size)
        for name in names
    }
    computed = num_tokens + num_context_tokens
    hours = None if rate is None else computed / rate / num_actors / 3600
    price = None if hours is None or price_per_hour is None else hours * num_actors * price_per_hour
    return Estimate(computed, sizes, hours, price)
