"""Ingestion on Ray Data: what runs in the process that holds the index.

The stages are ``plan_rows`` (tasks: read, compare, cut) and `Encoder` (actors: embed,
prefill, compress, encode, store). Only this process writes the catalog, and chooses with context
``similar`` what each chunk is encoded after, once tasks have embedded all.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrag import arguments
from kvrag.arguments import shown
from kvrag.codec.names import LEVELS, RAW, expected_bytes_per_token, parse_codec
from kvrag.errors import ClusterError, ParameterError
from kvrag.ingest.config import DTYPE_BYTES, KV_FOLDER, IndexConfig
from kvrag.ingest.encoders import check_lasting
from kvrag.ingest.plan import Plan, find_gone
from kvrag.ingest.profiles import read_kept
from kvrag.ingest.report import FailedDocument, IngestReport
from kvrag.ingest.stages import Run, lacking, windows
from kvrag.optiontable import check_options, described, option
from kvrag.plugins import require
from kvrag.store.base import tiers_of

if TYPE_CHECKING:
    from kvrag.chunk import Chunk, ChunkKey
    from kvrag.ingest.companions import Companions
    from kvrag.ingest.index import Index
    from kvrag.ingest.limits import ParseLimits
    from kvrag.ingest.ray.packets import Collector, Job, Packet
    from kvrag.ingest.ray.reading import Listed


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
    names = [
        parse_codec(preset if len(levels) == 1 else f"{preset}:{level}").label
        for preset, levels in LEVELS.items()
        for level in levels
    ]
    given = config.bytes_per_token, DTYPE_BYTES[config.dtype]
    return {one: num_tokens * expected_bytes_per_token(one, *given) for one in [RAW, *names]}


_FILES_A_TASK, _BYTES_A_TASK, _MOST_TASKS = 8, 32 << 20, 4096
# So that a machine of two processors has room for both stages: parsing waits for its own process.
_PLAN_CPUS = 0.25
_READ_CPUS = 1.0  # of a task that reads a user's dataset, unless it says otherwise


def ingest(
    dataset: Any,
    index: Index,
    options: RayOptions | None = None,
    *,
    dry_run: bool = False,
    force: bool = False,
    limits: ParseLimits | None = None,
    loaders: Mapping[str, str] | None = None,
) -> IngestReport:
    """Add the rows of a dataset of Ray to an index.

    Parameters
    ----------
    dataset
        A `ray.data.Dataset`. Each row is a document: its text in ``text`` (or ``page_content``,
        ``content``, ``body``, ``passage``), its source in ``source`` or ``id`` (otherwise its
        content names it), the other columns are metadata. A row with ``bytes`` and ``path`` (of
        `ray.data.read_binary_files`) is a file, which kvrag's loaders read. If two rows have one
        source, the first is used.
    index
        An open index whose records are in a store that every machine can open.
    options
        What to use of the cluster; None means the defaults.
    dry_run, force, limits, loaders
        As in `Index.add`.

    Returns
    -------
    IngestReport
        The same as from `Index.add`.

    Raises
    ------
    ClusterError
        When the cluster cannot be used, or gives up, and for an error in one of its workers.
    ParameterError
        When `dataset` is none, or the index cannot be filled from other machines.
    KVRagError
        As `Index.add` does, for an error in this process.
    """
    if not hasattr(dataset, "map_batches"):
        raise ParameterError(
            f"dataset {shown(dataset)}: expected a dataset of Ray, such as "
            "ray.data.read_parquet(...) gives"
        )
    return index.add(
        (),
        dry_run=dry_run,
        force=force,
        limits=limits,
        loaders=loaders,
        runner=RayRunner(options, dataset),
    )


class RayRunner:
    """Carries out ingestions on a cluster (`kvrag.ingest.stages.Runner`).

    Parameters
    ----------
    options
        What to use of the cluster; None means the defaults.
    dataset
        A dataset of Ray to read instead of the given files and documents.
    listed
        Files to read instead (`kvrag.ingest.ray.reading.list_places`).

    Attributes
    ----------
    cpu_seconds
        Processor time of the calls in other processes, all threads of these.
    config
        Settings of the index that it filled last.
    """

    def __init__(
        self,
        options: RayOptions | None = None,
        dataset: Any = None,
        listed: Sequence[Listed] | None = None,
    ) -> None:
        self._options = options or RayOptions()
        self._dataset = dataset
        self._listed = listed
        self._has_rows = dataset is not None or listed is not None
        self.cpu_seconds = 0.0
        self.config: IndexConfig | None = None

    def __call__(self, run: Run) -> Plan:
        """Plan, compute and commit; in a dry run only plan."""
        self.config = run.config
        with connected(self._options) as ray:
            self._check(ray, run)
            started = time.perf_counter()
            plan = Plan()
            rows = self._rows(ray, run, plan)
            with settings(rows.context, self._options):
                self._run(ray, run, plan, rows)
            run.outcome.seconds = time.perf_counter() - started
            return plan

    def _check(self, ray: Any, run: Run) -> None:
        """Raise ParameterError if other machines cannot fill the index."""
        storage, config = run.storage, run.config
        check_lasting(storage.store)
        options = self._options
        cpus = options.min_actors * options.cpus + _PLAN_CPUS
        cpus += 0.0 if self._dataset is None else _READ_CPUS
        gpus = options.min_actors * options.gpus
        found = ray.cluster_resources()
        for name, each, needed, what, told in (
            ("CPU", options.cpus, cpus, "processors", "ray-cpus=0.5"),
            ("GPU", options.gpus, gpus, "graphics cards", "ray-gpus=0"),
        ):
            # Other clusters may grow.
            if options.address == "local" and not run.dry_run and needed > found.get(name, 0.0):
                raise ParameterError(
                    f"{options.min_actors} workers of {each:g} {what}, and the stages before them, "
                    f"take {needed:g} {what}, and this machine has {found.get(name, 0.0):g}: ask "
                    f"for fewer (--ray-actors), or give each less (--{told})"
                )
        if config.key_check:
            raise ParameterError(
                "an index with a key cannot be filled with Ray: its object store would hold the "
                "text of documents unencrypted; ingest without --ray"
            )
        nodes = () if config.store or self._options.store else ray.nodes()
        if {node["NodeManagerHostname"] for node in nodes if node["Alive"]} - {
            socket.gethostname()
        }:
            raise ParameterError(
                f"the KV of {storage.path} is in its own folder, which other machines do not "
                "share: make an index with --store (redis://, s3://), or use --ray local"
            )
        if not run.encoders.reference:
            raise ParameterError(
                "the index's model was built in memory, and other processes cannot load it: save "
                "it to a folder, and make the index with that"
            )

    def _rows(self, ray: Any, run: Run, plan: Plan) -> Any:
        """Return the dataset of what is read; notes in `plan` what needs no reading."""
        from kvrag.ingest.ray.packets import document_row, file_row, listed_row

        if self._dataset is not None:
            return self._dataset
        if self._listed is not None:
            rows = [listed_row(one) for one in self._listed]
            size_bytes = sum(one.size_bytes // one.num_parts for one in self._listed)
            return _in_tasks(ray, rows, size_bytes)
        catalog, sources = run.storage.catalog.documents, run.sources
        plan.failed += [FailedDocument(one.source, one.reason) for one in sources.failed]
        find_gone(catalog, sources, plan)
        rows = [file_row(catalog, path) for path in sources.files]
        rows += [document_row(catalog, one) for one in sources.documents.values()]
        return _in_tasks(ray, rows, 0)

    def _run(self, ray: Any, run: Run, plan: Plan, rows: Any) -> None:
        from kvrag.ingest.ray.packets import Collector, plan_rows

        # Rows that the driver makes say themselves what is known.
        known = None
        if self._has_rows:
            documents = run.storage.catalog.documents.digests()
            known = ray.put(documents) if documents else None

        def planned(job: Job) -> Any:
            return rows.map_batches(
                plan_rows,
                batch_size=None,
                batch_format="pyarrow",
                num_cpus=_PLAN_CPUS,
                fn_kwargs={"job": job, "known": known},
            )

        job = self._job(run, "", b"")
        companions: Companions | None = None
        collector = Collector(run, plan, self._has_rows)
        if run.dry_run:
            packets = planned(job)
        elif job.is_similar:
            # Whole: what a chunk is encoded after may come last.
            packets = planned(job).materialize()
            companions = self._companions(ray, run, collector, packets)
        else:
            coded = self._coded(run, lambda: _packets(planned(job)))
            packets = self._computed(ray, planned(coded), coded)
        # Its executor would outlive the connection, and start another Ray.
        with contextlib.closing(_packets(packets)) as made:
            collector.collect(made, companions)
        self.cpu_seconds = collector.cpu_seconds

    def _companions(self, ray: Any, run: Run, collector: Collector, embedded: Any) -> Companions:
        """Return what gives chunks the context ``similar``, and has workers encode them."""
        from kvrag.ingest.companions import Companions
        from kvrag.ingest.ray.packets import pack, single_chunks

        jobs: list[Job] = []

        def encode(missing: list[tuple[ChunkKey, Chunk]]) -> dict[ChunkKey, str]:
            if not jobs:
                if run.storage.coding.needs_profile:
                    run.codec_for([chunk for _, chunk in missing], lambda _: None)
                jobs.append(self._coded(run))
            (job,) = jobs
            packets = [pack(one) for one in single_chunks(missing, job.batch_tokens)]
            made = self._computed(ray, ray.data.from_arrow(packets), job)
            with (
                settings(made.context, self._options),
                contextlib.closing(_packets(made)) as encoded,
            ):
                return collector.encoded(encoded)

        with contextlib.closing(_packets(embedded)) as found:
            planned = {one.source for packet in found for one in packet.plan.documents}
        return Companions(run.storage, run.encoders, planned, encode)

    def _computed(self, ray: Any, packets: Any, job: Job) -> Any:
        """Return the dataset of packets with their vectors, and with their KV stored."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        from kvrag.ingest.ray.packets import Attempts, Encoder, RemoteAttempts

        options = self._options
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        attempts = (
            ray.remote(Attempts)
            .options(num_cpus=0, max_restarts=-1, scheduling_strategy=here)
            .remote()
        )
        return packets.map_batches(
            Encoder,
            batch_size=1,
            batch_format="pyarrow",
            compute=ray.data.ActorPoolStrategy(
                min_size=options.min_actors,
                max_size=options.max_actors,
                # One waits while the other is computed.
                max_tasks_in_flight_per_actor=2,
            ),
            num_cpus=options.cpus,
            num_gpus=options.gpus,
            fn_constructor_kwargs={"job": job, "attempts": RemoteAttempts(attempts)},
        )

    def _coded(
        self, run: Run, packets: Callable[[], Generator[Packet, None, None]] | None = None
    ) -> Job:
        """Return the job with codec and profile of new records; fits the profile here if it must.

        It is fitted to the chunks that the single-machine path would fit it to.
        """
        from kvrag.ingest.ray.packets import assemble

        storage = run.storage
        if storage.coding.needs_profile and packets is not None:
            home = tiers_of(storage.store)[-1]
            with contextlib.closing(packets()) as made:
                documents = assemble(one for packet in made for one in packet.plan.documents)
                for window in windows(documents):
                    if missing := lacking(window, storage.config.key_of, home):
                        run.codec_for([chunk for _, chunk in missing], lambda _: None)
                        break
        coding = storage.coding
        if coding.needs_profile:
            return self._job(run, coding.codec.name, b"")
        profile = coding.profile_hash
        content = storage.profiles.get(profile).content if profile else b""
        return self._job(run, coding.label, content)

    def _job(self, run: Run, codec: str, profile: bytes) -> Job:
        from kvrag.ingest.ray.packets import Job

        storage, options = run.storage, self._options
        store = options.store or storage.config.store or f"file:{storage.path / KV_FOLDER}"
        return Job(
            folder=str(storage.path),
            config=run.config,
            model=run.encoders.reference,
            device=run.encoders.device,
            store=store,
            codec=codec,
            profile=profile,
            writer=read_kept(storage.path, writer) if (writer := run.config.writer) else b"",
            limits=run.parser.limits,
            loaders=tuple(run.parser.loaders.items()),
            force=run.force,
            dry_run=run.dry_run,
            batch_tokens=options.batch_tokens,
            cpus=options.cpus,
        )


def _in_tasks(ray: Any, rows: list[dict[str, str]], size_bytes: int) -> Any:
    """Return a dataset of rows, in blocks of what one task reads; `size_bytes` is of all."""
    wanted = max(1, -(-len(rows) // _FILES_A_TASK), size_bytes // _BYTES_A_TASK)
    num_tasks = max(1, min(wanted, len(rows), _MOST_TASKS))
    return ray.data.from_items(rows, override_num_blocks=num_tasks)


def _packets(dataset: Any) -> Generator[Packet, None, None]:
    from kvrag.ingest.ray.packets import unpack

    for table in dataset.iter_batches(batch_size=None, batch_format="pyarrow"):
        yield from unpack(table)


# The least that a token takes, with its offset and text: a full packet is then a separate block.
_BYTES_PER_TOKEN = 7
_OWN_ERROR = re.compile(r"kvrag\.errors\.\w+: (.+)")
_OTHER_ERROR = re.compile(r"(?!ray\.)[A-Za-z_][\w.]*(: .*)?$")
_BARS = "ray.data._internal.progress"
# Here a failed packet's traceback is printed, up to twice; `connected` tells the reason.
_TRACEBACKS = ("ray.data._internal.execution.streaming_executor_state", "ray.data.exceptions")
_HOST_AND_PORT = re.compile(r"(?:ray://)?\[?([^/\]]+)\]?:(\d+)")
_PATIENCE = 10.0  # seconds


@contextlib.contextmanager
def connected(options: RayOptions) -> Iterator[Any]:
    """Connect to the cluster, or use the caller's connection; yield the module `ray`.

    Raises
    ------
    ClusterError
        When the cluster does not answer, or gives up inside the block.
    """
    # Before Ray is imported: it asks for no consent.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray = require("ray", "ray")
    require("ray.data", "ray")
    is_ours = not ray.is_initialized()
    try:
        if is_ours:
            _connect(ray, options.address)
        yield ray
    except ray.exceptions.RayError as error:
        is_of_worker = isinstance(error, ray.exceptions.RayTaskError)
        what = "a worker of Ray failed" if is_of_worker else "the cluster of Ray gave up"
        raise ClusterError(
            f"{what} ({reason_of(error)}); finished work is kept, and the same command goes on. "
            "Workers have the environment of 'ray start', not this command's"
        ) from error
    finally:
        if is_ours:
            ray.shutdown()


def reason_of(error: Exception) -> str:
    """Return what ended a worker: Ray puts its whole traceback into the message."""
    lines = str(error).splitlines()
    own = [found[1] for line in lines if (found := _OWN_ERROR.match(line))]
    others = [line for line in lines if _OTHER_ERROR.match(line)]
    first = lines[0] if lines else "no reason"
    return own[-1] if own else others[0] if others else f"{type(error).__name__}: {first}"


def _connect(ray: Any, address: str | None) -> None:
    tried = _default_address() if address in (None, "auto") else address
    remedy = "start it with 'ray start --head', or use --ray local"
    try:
        if found := _HOST_AND_PORT.fullmatch(tried or ""):
            # Ray itself tries for minutes.
            socket.create_connection((found[1], int(found[2])), _PATIENCE).close()
            remedy = (
                "something listens there: if it is Ray with token authentication, set "
                "RAY_AUTH_MODE=token here and copy the cluster's ~/.ray/auth_token"
            )
        ray.init(
            address=address,
            log_to_driver=False,
            logging_level=logging.WARNING,
            **({"include_dashboard": False} if address == "local" else {}),
        )
    except (OSError, OverflowError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        raise ClusterError(
            f"the cluster of Ray at {tried or 'the default address'} cannot be used ({error}); "
            + remedy
        ) from error


def _default_address() -> str | None:
    """Return where Ray looks for a cluster by itself; None if it starts one, or elsewhere."""
    named = os.environ.get("RAY_ADDRESS")
    if named and named != "auto":
        return named
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    with contextlib.suppress(OSError):
        return Path(folder, "ray", "ray_current_cluster").read_text().strip()
    return None


@contextlib.contextmanager
def settings(context: Any, options: RayOptions) -> Iterator[None]:
    """Set a dataset's context for an ingestion, and restore it afterwards.

    Packets keep their order, so that the catalog is that of the single-machine path.
    """
    from ray.data import ExecutionOptions, ExecutionResources

    wanted = {
        "execution_options": ExecutionOptions(
            preserve_order=True,
            resource_limits=ExecutionResources.for_limits(object_store_memory=options.store_bytes),
        ),
        "target_max_block_size": _BYTES_PER_TOKEN * options.batch_tokens,
        "enable_progress_bars": sys.stderr.isatty(),
        "print_on_execution_start": False,
        # Half an hour without a packet is slow, and not wrong.
        "execution_no_progress_timeout_s": -1,
    }
    before = {name: getattr(context, name) for name in wanted}
    # Without a terminal, the last one warns that there are no bars.
    least = {"ray": logging.WARNING, "ray.data": logging.WARNING, _BARS: logging.ERROR}
    least |= dict.fromkeys(_TRACEBACKS, logging.CRITICAL)
    levels = {name: logging.getLogger(name).level for name in least}
    try:
        for name, value in wanted.items():
            setattr(context, name, value)
        for name, level in least.items():
            logging.getLogger(name).setLevel(max(level, levels[name]))
        yield
    finally:
        for name, value in before.items():
            setattr(context, name, value)
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
