"""What an ingestion on Ray Data is asked to use."""

from __future__ import annotations

from dataclasses import dataclass

from kvrag import arguments
from kvrag.arguments import shown
from kvrag.errors import ParameterError


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
