"""`kvrag ingest`, also on a cluster of Ray, and `kvrag adopt`: documents into an index."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvrag.cli import console
from kvrag.cli import options as o
from kvrag.cli.console import EXIT_FAILURE
from kvrag.cli.indexing import Target, index_into
from kvrag.cli.opening import load_object
from kvrag.errors import ParameterError
from kvrag.ingest.limits import ParseLimits
from kvrag.ingest.settings import IndexSettings
from kvrag.optiontable import options_of, text_of
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
    """The options of `kvrag ingest` that concern Ray, as they were given.

    Attributes
    ----------
    ray
        Compute on a cluster of Ray: HOST:PORT, auto (the cluster in RAY_ADDRESS or on this
        machine), or local (a new one on this machine). PATH may then be a Parquet file, and a URL
        (s3://, gs://, abfss://, file://).
    ray_actors
        Processes that compute KV on the cluster. Without MOST, as many as fit.
    ray_cpus
        Processors of each of them.
    ray_gpus
        Graphics cards of each.
    ray_memory
        Most bytes that wait between the stages, in Ray's object store.
    """

    ray: Annotated[str | None, typer.Option("--ray", metavar="ADDRESS")] = None
    ray_actors: Annotated[str, o.setting(metavar="LEAST[:MOST]")] = "1"
    ray_cpus: Annotated[float, o.setting(parser=o.above_zero, metavar="NUMBER")] = 1.0
    ray_gpus: Annotated[float, o.setting(min=0.0)] = 0.0
    ray_memory: Annotated[str | None, o.setting(metavar="BYTES")] = None

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
        from kvrag.ingest.ray.driver import size_by_codec

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
        memory = self.ray_memory
        limit = None if memory is None else parse_bytes(memory, "--ray-memory: ")
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


DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Show what would be done; write nothing.")
]
_LIMITS = ParseLimits()
# None means that of an index which is there, or the default of a new one.
_MADE_WITH = dict.fromkeys(
    (
        *("embedding", "chunk_tokens", "codec", "dtype"),
        *("context", "trust", "writer", "control_tokens"),
    )
)
_OF_INDEX = {one.name: one for one, _ in options_of(IndexSettings) if one.name in _MADE_WITH}

if TYPE_CHECKING:
    EmbeddingOption = str | None

    class Making(o.Options):
        """The settings of a new index."""
else:
    EmbeddingOption = o.annotated(_OF_INDEX["embedding"], None)
    Making = o.group("Making", o.Options, _OF_INDEX.values(), **_MADE_WITH)


def adopt(
    vector_store: Annotated[str, typer.Argument(metavar="MODULE:NAME")],
    target: Target,
    embedding: EmbeddingOption = None,
    dry_run: DryRunOption = False,
    as_json: o.JsonOption = False,
) -> None:
    """Index the documents of another vector store as they were cut there.

    A chain over that store then reuses their KV, without any other change. Run it again
    after the store has changed; documents that have left it are removed with 'kvrag rm'.

    Parameters
    ----------
    vector_store
        The store: an object of Python, or a function that returns it.
    """
    from kvrag.ingest.adopting import adopted

    report = index_into(
        target,
        adopted(load_object(vector_store, "MODULE:NAME")),
        {"embedding": embedding},
        dry_run=dry_run,
        as_json=as_json,
    )
    if not report.ok:
        raise typer.Exit(EXIT_FAILURE)


def ingest(
    paths: Annotated[list[str], typer.Argument(metavar="PATH")],
    target: Target,
    making: Making,
    asked: Asked,
    profile: o.ProfileOption = None,
    max_file_size: Annotated[
        str, o.setting(metavar="BYTES", help=text_of(ParseLimits, "max_file_bytes"))
    ] = f"{_LIMITS.max_file_bytes // 10**6}MB",
    parse_seconds: Annotated[
        float,
        o.setting(metavar="SECONDS", parser=o.above_zero, help=text_of(ParseLimits, "seconds")),
    ] = _LIMITS.seconds,
    parse_memory: Annotated[
        str, o.setting(metavar="BYTES", help=text_of(ParseLimits, "memory_bytes"))
    ] = f"{_LIMITS.memory_bytes >> 30}GiB",
    loader: Annotated[list[str] | None, o.setting(metavar="SUFFIX=MODULE:FUNCTION")] = None,
    first_records: Annotated[bool, o.setting("--first-records")] = False,
    force: Annotated[bool, o.setting("--force")] = False,
    dry_run: DryRunOption = False,
    as_json: o.JsonOption = False,
) -> None:
    """Read documents, compute the KV of their chunks once, and store it in an index.

    Run it again after the documents change. Unchanged files take no model time; changed files are
    replaced, and deleted files are removed from the index. If a run is killed, the next one
    completes it. A file that cannot be read within the limits is reported and left out; the others
    are indexed, and the exit code is 1.

    Parameters
    ----------
    paths
        Files and folders to index.
    loader
        Function that reads files with this suffix, such as .odp=slides:load. It takes a path and
        bytes, yields kvrag.Document objects, and overrides a built-in loader for the suffix.
        Repeatable.
    first_records
        With a filler or similar, also store each chunk's KV for the first place of a prompt now.
        Otherwise the first prompt that begins with the chunk computes and stores it.
    force
        Read every file again, even if it looks unchanged.
    """
    from kvrag.codec.names import parse_codec
    from kvrag.ingest.files import resolve_path
    from kvrag.ingest.loaders import sought_suffixes
    from kvrag.ingest.parsing import Parser, check_loaders
    from kvrag.ingest.profiles import read_profile
    from kvrag.ingest.ray.reading import check_scheme, is_for_ray
    from kvrag.store.registry import without_password

    # Check everything before an index is created.
    loaders = check_loaders(_loaders(loader or []))
    for_ray = [
        one
        for one in paths
        if is_for_ray(one) and ("://" in one or Path(one).suffix.lower() not in loaders)
    ]
    for one in for_ray:
        check_scheme(one)
    if asked.ray is None:
        asked.check_unused(for_ray)
    elif for_ray and len(for_ray) < len(paths):
        raise ParameterError(
            "URLs and Parquet are read in one run, and files and folders in another: give "
            f"{', '.join(map(without_password, for_ray))} alone"
        )
    is_read_by_ray = bool(for_ray)
    for path in paths:
        if not path.strip():
            # An empty path would mean the working directory, with everything in it.
            raise ParameterError("PATH is empty: give a file or a folder")
        if not is_read_by_ray:
            resolve_path(path)
    limits = _limits(max_file_size, parse_seconds, parse_memory)
    if loaders:
        with Parser(limits, loaders) as parser:
            parser.start()
    settings = {name: value for name, value in making.values.items() if value is not None}
    IndexSettings(**settings)
    # As an index records them.
    if "codec" in settings:
        settings["codec"] = parse_codec(settings["codec"]).label
    suffixes = sorted({*sought_suffixes(), *loaders})
    runner = None if asked.ray is None else asked.runner(for_ray, suffixes, target.store)

    def estimated(report: IngestReport) -> dict[str, dict[str, Any]]:
        if runner is None or not dry_run:
            return {}
        return {"estimate": asked.estimate(runner, report)}

    # A cluster that does not answer leaves no empty index.
    with asked.connected():
        report = index_into(
            target,
            [] if is_read_by_ray else paths,
            settings,
            profile=None if profile is None else read_profile(profile),
            dry_run=dry_run,
            as_json=as_json,
            first_records=first_records,
            more=estimated,
            force=force,
            limits=limits,
            loaders=loaders,
            runner=runner,
        )
    if not as_json:
        for found in estimated(report).values():
            asked.print_estimate(found)
    if not (report.added or report.changed or report.unchanged or report.failed):
        console.note(
            "no file of a known type was found (hidden files are skipped); known types: "
            + " ".join(suffixes)
            + (" .parquet" if for_ray else "; .parquet is read with --ray, at a URL (file://)")
        )
    if plain := _code_read_as_plain_text([*report.added, *report.changed], loaders):
        console.note(
            f"source code ({' '.join(plain)}) was read as plain text; pip install 'kvrag[code]', "
            "then --force, to cut it between definitions"
        )
    if not report.ok:
        raise typer.Exit(EXIT_FAILURE)


def _code_read_as_plain_text(sources: Iterable[str], loaders: Collection[str]) -> list[str]:
    """Return the suffixes of source code whose grammar is not installed."""
    from kvrag.ingest.code import CODE_SUFFIXES, is_installed

    suffixes = {Path(source).suffix.lower() for source in sources} & CODE_SUFFIXES
    return sorted(one for one in suffixes - set(loaders) if not is_installed(one))


def _limits(max_file_size: str, parse_seconds: float, parse_memory: str) -> ParseLimits:
    from kvrag.store.registry import parse_bytes

    return ParseLimits(
        max_file_bytes=parse_bytes(max_file_size, "--max-file-size: "),
        seconds=parse_seconds,
        memory_bytes=parse_bytes(parse_memory, "--parse-memory: "),
    )


def _loaders(given: list[str]) -> dict[str, str]:
    loaders = {}
    for text in given:
        suffix, equals, name = text.partition("=")
        if not equals:
            raise ParameterError(f"--loader {text}: expected SUFFIX=MODULE:FUNCTION")
        loaders[suffix] = name
    return loaders
