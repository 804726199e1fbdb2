"""`kvrag ingest --ray`: what the options ask of a cluster, and what a dry run will take."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvrag.cli import console
from kvrag.cli import options as o
from kvrag.errors import ParameterError
from kvrag.plugins import require

if TYPE_CHECKING:
    from kvrag.ingest.ray import RayOptions, RayRunner
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

    ray: Annotated[
        str | None,
        typer.Option(
            "--ray",
            metavar="ADDRESS",
            help="Compute on a cluster of Ray: HOST:PORT, auto (the cluster in RAY_ADDRESS or on "
            "this machine), or local (a new one on this machine). PATH may then be a Parquet file, "
            "and a URL (s3://, gs://, abfss://, file://).",
        ),
    ] = None
    ray_actors: Annotated[
        str,
        o.setting(
            metavar="LEAST[:MOST]",
            help="Processes that compute KV on the cluster. Without MOST, as many as fit.",
        ),
    ] = "1"
    ray_cpus: Annotated[
        float,
        o.setting(parser=o.above_zero, metavar="NUMBER", help="Processors of each of them."),
    ] = 1.0
    ray_gpus: Annotated[float, o.setting(min=0.0, help="Graphics cards of each.")] = 0.0
    ray_memory: Annotated[
        str | None,
        o.setting(
            metavar="BYTES", help="Most bytes that wait between the stages, in Ray's object store."
        ),
    ] = None

    def check_unused(self, places: Sequence[str]) -> None:
        """Raise ParameterError for options and places that need ``--ray``."""
        from kvrag.store.registry import without_password

        for option in fields(self):
            if getattr(self, option.name) != option.default:
                name = option.name.replace("_", "-")
                raise ParameterError(
                    f"--{name} says what to use of a cluster: add --ray, or leave it out"
                )
        for place in places[:1]:
            raise ParameterError(
                f"{without_password(place)}: only tasks of Ray read it; add --ray (--ray local: on "
                "this machine)"
            )

    @contextlib.contextmanager
    def connected(self) -> Iterator[None]:
        """Connect to the cluster, if one is asked for. Raises ClusterError."""
        if self.ray is None:
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

    def estimate(self, runner: RayRunner, report: IngestReport) -> dict[str, Any]:
        """Return what the ingestion of a dry run will take, as plain values."""
        from kvrag.ingest.ray.options import size_by_codec

        assert runner.config is not None
        return {
            "num_tokens": report.num_tokens_computed + report.num_context_tokens,
            "size_bytes": size_by_codec(report.num_tokens_computed, runner.config),
        }

    def print_estimate(self, found: dict[str, Any]) -> None:
        """Print what the ingestion of a dry run will take."""
        sizes = ", ".join(
            f"{name} {console.format_bytes(size)}" for name, size in found["size_bytes"].items()
        )
        tokens = console.count(found["num_tokens"], "token")
        console.write(f"{tokens} to compute; KV by codec, at most: {sizes}\n")

    def _options(self, store: str | None) -> RayOptions:
        from kvrag.ingest.ray import RayOptions
        from kvrag.store.registry import parse_bytes

        least, most = self._actors()
        try:
            limit = None if self.ray_memory is None else parse_bytes(self.ray_memory)
        except ValueError as error:
            raise ParameterError(f"--ray-memory: {error}") from error
        try:
            return RayOptions(
                address=None if self.ray == "auto" else self.ray,
                min_actors=least,
                max_actors=most,
                cpus=self.ray_cpus,
                gpus=self.ray_gpus,
                store_bytes=limit,
                store=store,
            )
        except ParameterError as error:
            name, _, reason = str(error).partition(" ")
            raise ParameterError(f"{_OPTIONS.get(name, name)} {reason}") from error

    def _actors(self) -> tuple[int, int | None]:
        least, colon, most = self.ray_actors.partition(":")
        if not (least.isdecimal() and (most.isdecimal() or not colon)):
            raise ParameterError(
                f"--ray-actors {self.ray_actors}: expected LEAST or LEAST:MOST, such as 2:8"
            )
        return int(least), int(most) if colon else None
