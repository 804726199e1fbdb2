"""`kvrag ingest --ray`: what the options ask of a cluster, and what a dry run will take."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from kvrag.cli import console
from kvrag.errors import ParameterError
from kvrag.store.extras import require

if TYPE_CHECKING:
    from kvrag.ingest.ray import RayOptions, RayRunner
    from kvrag.ingest.ray.options import Estimate
    from kvrag.ingest.report import IngestReport

_OPTIONS = {
    "min_actors": "--ray-actors",
    "max_actors": "--ray-actors",
    "cpus": "--ray-cpus",
    "gpus": "--ray-gpus",
    "store_bytes": "--ray-memory",
}


@dataclass(frozen=True)
class Asked:
    """The options of `kvrag ingest` that concern Ray, as they were given."""

    address: str | None
    actors: str = "1"
    cpus: float = 1.0
    gpus: float = 0.0
    memory: str | None = None
    rate: float | None = None
    price: float | None = None

    def check_unused(self, places: Sequence[str]) -> None:
        """Raise ParameterError for options and places that need ``--ray``."""
        from kvrag.store.registry import without_password

        for option in fields(self):
            if getattr(self, option.name) != option.default and option.name != "address":
                raise ParameterError(
                    f"--ray-{option.name} says what to use of a cluster: add --ray, or leave it out"
                )
        for place in places[:1]:
            raise ParameterError(
                f"{without_password(place)}: only tasks of Ray read it; add --ray (--ray local: on "
                "this machine)"
            )

    @contextlib.contextmanager
    def connected(self) -> Iterator[None]:
        """Connect to the cluster, if one is asked for. Raises ClusterError."""
        if self.address is None:
            yield
            return
        from kvrag.ingest.ray.driver import connected

        with connected(self._options(None)):
            yield

    def runner(
        self, places: Sequence[str], suffixes: Sequence[str], store: str | None
    ) -> RayRunner:
        """Return the runner of an ingestion.

        Parameters
        ----------
        places
            What Ray reads itself; empty if files are given.
        suffixes
            Suffixes of the files to read there.
        store
            URL of the store as the user gave it.

        Raises
        ------
        ParameterError
            When an option has another form, a place cannot be listed, or Ray is not installed.
        """
        from kvrag.ingest.ray import RayRunner
        from kvrag.ingest.ray.reading import list_places

        options = self._options(store)
        # Before an index is made.
        require("ray", "ray")
        require("pyarrow", "ray")
        return RayRunner(options, listed=list_places(places, suffixes) if places else None)

    def estimate(self, runner: RayRunner, report: IngestReport) -> Estimate:
        """Return what the ingestion of a dry run will take."""
        from kvrag.ingest.ray.options import estimate

        assert runner.config is not None
        return estimate(
            report.num_tokens_computed,
            report.num_context_tokens,
            runner.config,
            num_actors=self._actors()[0],
            rate=self.rate,
            price_per_hour=self.price,
        )

    def print_estimate(self, found: Estimate) -> None:
        """Print what the ingestion of a dry run will take."""
        num_actors = self._actors()[0]
        sizes = ", ".join(
            f"{name} {console.format_bytes(size)}" for name, size in found.size_bytes.items()
        )
        console.write(f"KV by codec, at most: {sizes}\n")
        if found.hours is None:
            console.note("--ray-rate TOKENS (a second and worker) gives the hours")
            return
        said = (
            f"{console.count(found.num_tokens, 'token')} take {found.hours:,.2f} hours on "
            f"{console.count(num_actors, 'worker')}"
        )
        if found.price is not None:
            said += f", which cost {found.price:,.2f}"
        console.write(f"{said}\n")

    def _options(self, store: str | None) -> RayOptions:
        from kvrag.ingest.ray import RayOptions
        from kvrag.store.registry import parse_bytes

        least, most = self._actors()
        try:
            limit = None if self.memory is None else parse_bytes(self.memory)
        except ValueError as error:
            raise ParameterError(f"--ray-memory: {error}") from error
        try:
            return RayOptions(
                address=None if self.address == "auto" else self.address,
                min_actors=least,
                max_actors=most,
                cpus=self.cpus,
                gpus=self.gpus,
                store_bytes=limit,
                store=store,
            )
        except ParameterError as error:
            name, _, reason = str(error).partition(" ")
            raise ParameterError(f"{_OPTIONS.get(name, name)} {reason}") from error

    def _actors(self) -> tuple[int, int | None]:
        least, colon, most = self.actors.partition(":")
        if not (least.isdecimal() and (most.isdecimal() or not colon)):
            raise ParameterError(
                f"--ray-actors {self.actors}: expected LEAST or LEAST:MOST, such as 2:8"
            )
        return int(least), int(most) if colon else None
