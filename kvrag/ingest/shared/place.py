"""Where a shared index is: the parts of its URL, and the folder of this machine's view of it."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, urlencode

from kvrag import arguments
from kvrag.errors import ParameterError, StoreError
from kvrag.ingest.config import VIEW_OF_NAME
from kvrag.store.file import store_errors
from kvrag.store.objects import SCHEMES, Bucket, ObjectStore, server_of
from kvrag.store.registry import COMMON_OPTIONS, parse_bytes, parse_options

DEFAULT_VIEWS_BYTES = 100_000_000_000

_BUCKET_OPTIONS = ObjectStore.options


@dataclass(frozen=True)
class Place:
    """The URL of a shared index.

    Attributes
    ----------
    url
        The URL without options and without a slash at its end.
    query
        Its options, for the stores beside the log too.
    """

    url: str
    query: str

    def __str__(self) -> str:
        return self.url

    @property
    def full_url(self) -> str:
        """The URL with its options; the path in it is absolute."""
        return f"{self.url}?{self.query}" if self.query else self.url

    def store_url(self, name: str) -> str:
        """Return the URL of the store `name` within the index."""
        url = f"{self.url}/{name}"
        if url.startswith("file:"):
            url = "file:" + url.removeprefix("file://")
        return f"{url}?{self.query}" if self.query else url

    def bucket(self, name: str) -> Bucket:
        """Open the part `name` of the index's bucket."""
        options = {
            argument: parse(value)
            for key, value in parse_qsl(self.query)
            if key in _BUCKET_OPTIONS
            for argument, parse in [_BUCKET_OPTIONS[key]]
        }
        return Bucket(f"{self.url}/{name}", **options)

    @property
    def view(self) -> Path:
        """The folder of this machine's view; another server's bucket has another."""
        endpoint = dict(parse_qsl(self.query)).get("endpoint")
        whole = f"{self.url} {server_of(self.url.partition(':')[0], endpoint)}".strip()
        digest = hashlib.blake2b(whole.encode(), digest_size=8).hexdigest()
        name = re.sub(r"[^\w.-]+", "-", self.url.rpartition("/")[2])[:60]
        return views_folder() / f"{name}-{digest}"


def read_place(url: str) -> Place:
    """Read the URL of a shared index. Raises ParameterError."""
    place, _, query = url.partition("?")
    scheme, _, rest = place.partition("://")
    is_known = scheme in SCHEMES or (scheme == "file" and rest.startswith("/"))
    if not is_known or not rest.strip("/"):
        raise ParameterError(
            "a shared index is s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX or "
            "file:///FOLDER, and an index on this machine a folder without ://; found "
            f"{arguments.shown(url)}"
        )
    own = {} if scheme == "file" else _BUCKET_OPTIONS
    _, common = parse_options(url, own, {"key_file": COMMON_OPTIONS["key_file"]})
    # A whole path, since each process may run in another folder.
    pairs = {**dict(parse_qsl(query)), **common}
    if scheme == "file":
        place = f"file://{arguments.resolved_path(rest, 'file:')}"
    return Place(place.rstrip("/"), urlencode(pairs, safe="/:"))


def views_folder() -> Path:
    """Return the folder of all views: `KVRAG_VIEWS`, or one in the user's cache."""
    if named := os.environ.get("KVRAG_VIEWS"):
        return arguments.path(named, "KVRAG_VIEWS").absolute()
    return arguments.user_cache().absolute() / "kvrag" / "views"


def lock_path(view: Path) -> Path:
    """Return the file whose lock a process holds while it changes a view."""
    return view.with_name(f"{view.name}.lock")


def in_use_path(view: Path) -> Path:
    """Return the file whose lock every process shares that has a view open."""
    return view.with_name(f"{view.name}.in-use")


@contextmanager
def held(path: Path, *, shared: bool = False, waits: bool = True) -> Iterator[None]:
    """Hold an advisory lock on a file, which is created.

    Raises
    ------
    BlockingIOError
        When another process holds the lock, and this one does not wait.
    StoreError
        When the file cannot be made.
    """
    with store_errors("write", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        fcntl.flock(descriptor, kind if waits else kind | fcntl.LOCK_NB)
        os.utime(descriptor)
        yield
    finally:
        os.close(descriptor)


def remove_view(view: Path) -> bool:
    """Remove a view unless a process has it open; return whether it is gone. Raises StoreError."""
    try:
        with held(in_use_path(view), waits=False):
            shutil.rmtree(view, ignore_errors=True)
    except BlockingIOError:
        return False
    return True


def remove_scratch(view: Path) -> None:
    """Remove what killed processes have left in a view, unless a process has it open."""
    with contextlib.suppress(BlockingIOError), held(in_use_path(view), waits=False):
        for path in view.glob(".*.tmp"):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def make_room(keep: Path) -> None:
    """Remove views that no process uses, the longest unused first, until they fit their limit.

    The limit is `KVRAG_VIEWS_BYTES`. The view `keep` stays.
    """
    name = "KVRAG_VIEWS_BYTES"
    limit = parse_bytes(os.environ.get(name, str(DEFAULT_VIEWS_BYTES)), f"{name}: ")
    # Other folders here are no views: uploads.
    views = [one.parent for one in keep.parent.glob(f"*/{VIEW_OF_NAME}")]
    sizes = {one: _size_of(one) for one in views}
    total = sum(sizes.values())
    for view in sorted(views, key=lambda one: _last_used(one)):
        if total <= limit:
            return
        if view == keep:
            continue
        with contextlib.suppress(StoreError):
            total -= sizes[view] if remove_view(view) else 0


def _size_of(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):  # passes over folders that vanish meanwhile
        for name in names:
            with contextlib.suppress(OSError):
                total += Path(parent, name).lstat().st_size
    return total


def _last_used(view: Path) -> float:
    with contextlib.suppress(OSError):
        return in_use_path(view).stat().st_mtime
    return 0.0
