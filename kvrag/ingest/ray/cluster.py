"""The connection to a cluster of Ray, and the settings of Ray Data for one run."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvrag.errors import ClusterError
from kvrag.ingest.ray.options import RayOptions
from kvrag.store.extras import require

# The least that ids and offsets take: a full packet is then always a separate block.
_BYTES_PER_TOKEN = 8
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
    except ray.exceptions.RayTaskError as error:
        raise ClusterError(
            f"a worker of Ray failed ({reason_of(error)}); finished work is kept, and the same "
            "command goes on"
        ) from error
    except ray.exceptions.RayError as error:
        raise ClusterError(
            f"the cluster of Ray gave up ({reason_of(error)}); finished work is kept, and the same "
            "command goes on. Its workers have the environment of 'ray start', not this command's"
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


def is_one_machine(ray: Any) -> bool:
    """Return whether all nodes of the cluster are on this machine."""
    names = {node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]}
    return names <= {socket.gethostname()}


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
