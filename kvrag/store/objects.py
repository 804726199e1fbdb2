"""Records as objects in a bucket: Amazon S3 and compatible services, Google Cloud, Azure.

Each record is one object, ``PREFIX/ab/abcd...ef.kv``, read by ranges. An object is written whole or
not at all, so a killed writer leaves nothing. Every range is requested under the tag that the
object had when it was opened, so readers never see another object's bytes.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, ClassVar
from urllib.parse import urlsplit

from kvrag.arguments import shown
from kvrag.chunk import ChunkKey
from kvrag.errors import ParameterError, RecordError, StoreError, StoreUnreachableError
from kvrag.store.extras import require
from kvrag.store.metrics import MISS_ABSENT, MISS_UNREADABLE, StoreMetrics
from kvrag.store.remote import HeadedRecord, Options, RemoteStore, seconds

SCHEMES = ("s3", "gs", "az")
DEFAULT_TIMEOUT_SECONDS = 5.0

# The answer that opens a record brings this much: most records' header, or all of a small record.
_HEAD_BYTES = 16 << 10
_NAME = re.compile(r"([0-9a-f]{2})/(\1[0-9a-f]{38})\.kv")
_MAX_RETRIES = 2
# The library reports a missing permission only in words, whatever the operation.
_REFUSALS = ("403 Forbidden", "401 Unauthorized", "InvalidAccessKeyId", "redential")
_MOST_TEXT = 300
# Names of the options for region, endpoint and permission to do without TLS, by kind of bucket.
_CONFIG = {"s3": "aws_", "gs": "google_", "az": "azure_"}
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_SERVICE_ACCOUNT",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}


class ObjectRecord(HeadedRecord):
    """An opened record of an `ObjectStore`."""

    def __init__(
        self, store: ObjectStore, key: ChunkKey, size_bytes: int, tag: str | None, head: bytes
    ) -> None:
        super().__init__(key, size_bytes, head, store.metrics)
        self._store = store
        self._tag = tag

    def _fetch(self, first: int, buffer: memoryview) -> None:
        content = self._store.read_range(self._key, first, first + buffer.nbytes, self._tag)
        if len(content) != buffer.nbytes:
            raise RecordError(
                f"record {self._key} in {self._store.url}: expected {buffer.nbytes} bytes from "
                f"{first} on, found {len(content)}; ingest its document again"
            )
        buffer[:] = memoryview(content)


class ObjectStore(RemoteStore):
    """Records in a bucket.

    The store finds credentials where the provider's own tools do: in the environment, or in the
    metadata of one of the provider's machines.

    Parameters
    ----------
    url
        ``s3://BUCKET[/PREFIX]``, ``gs://BUCKET[/PREFIX]`` or ``az://CONTAINER[/PREFIX]``.
    endpoint
        URL of another server that speaks the same protocol (MinIO, Ceph, an emulator).
    region
        Region of an S3 bucket; None takes the environment's.
    timeout_seconds
        How long a server may send nothing before it counts as unreachable.
    must_answer
        Raise if the server is unreachable now; otherwise it may become reachable later.

    Raises
    ------
    ParameterError
        When the URL is invalid, or the library ``obstore`` is not installed.
    StoreUnreachableError
        When the server does not answer.
    StoreError
        When the server refuses: no such bucket, no permission.
    """

    options: ClassVar[Options] = {
        "endpoint": ("endpoint", str),
        "region": ("region", str),
        "timeout": ("timeout_seconds", seconds),
    }

    def __init__(
        self,
        url: str,
        *,
        endpoint: str | None = None,
        region: str | None = None,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        must_answer: bool = True,
    ) -> None:
        self._obstore = require("obstore", "objects")
        stores = require("obstore.store", "objects")
        self._errors_of = require("obstore.exceptions", "objects")
        scheme, _, place = url.partition("://")
        if scheme not in SCHEMES or not place.strip("/"):
            known = ", ".join(f"{name}://BUCKET/PREFIX" for name in SCHEMES)
            raise ParameterError(f"a bucket is {known}; found {shown(url)}")
        self.url = url.rstrip("/")
        self._scheme = scheme
        config: dict[str, Any] = {}
        if endpoint is not None:
            _check_endpoint(endpoint)
            name = "base_url" if scheme == "gs" else "endpoint"
            config[f"{_CONFIG[scheme]}{name}"] = endpoint
        if region is not None:
            config["aws_region"] = region
        timeout = timedelta(seconds=timeout_seconds)
        try:
            self._bucket = stores.from_url(
                self.url,
                config=config or None,
                client_options={
                    "allow_http": endpoint is not None and endpoint.startswith("http:"),
                    "connect_timeout": timeout,
                    # Limits silence, not a whole request: a large range on a slow line is fine.
                    "read_timeout": timeout,
                    "timeout": timedelta(seconds=60 * timeout_seconds),
                },
                retry_config={
                    "max_retries": _MAX_RETRIES,
                    "retry_timeout": 2 * timeout,
                    "backoff": {
                        "base": 2,
                        "init_backoff": timedelta(milliseconds=50),
                        "max_backoff": timeout,
                    },
                },
            )
        except (self._errors_of.BaseError, ValueError) as error:
            raise ParameterError(
                f"not a bucket of {scheme}: {_text_of(error)}; expected {scheme}://BUCKET/PREFIX, "
                f"and {_CREDENTIALS[scheme]} set"
            ) from error
        self.metrics = StoreMetrics(scheme)
        try:
            with self._errors("open"):
                for _ in self._obstore.list(self._bucket, chunk_size=1):
                    break
        except StoreUnreachableError:
            if must_answer:
                raise

    def put(self, key: ChunkKey, record: bytes) -> None:
        """Write a record; an existing record stays. Raises StoreError.

        When two processes put one key at the same time, one of the records stays, whole.
        """
        if not self.contains(key):
            self.replace(key, record)

    def replace(self, key: ChunkKey, record: bytes) -> None:
        """Write a record in place of the existing one; further reads of that one are refused."""
        with self._errors("write to"):
            self._obstore.put(self._bucket, _name_of(key), record)
        self.metrics.wrote(len(record))

    def open(self, key: ChunkKey) -> ObjectRecord | None:
        """Open a record for reading, or return None if there is none. Raises StoreError."""
        try:
            with self._errors("read"):
                try:
                    head, meta = self._get(key, {"range": (0, _HEAD_BYTES)})
                except self._errors_of.BaseError as error:
                    # An empty object has no range.
                    if not _is_range_refused(error):
                        raise
                    head, meta = b"", self._obstore.head(self._bucket, _name_of(key))
        except _AbsentError:
            self.metrics.miss(MISS_ABSENT)
            return None
        except StoreError:
            self.metrics.miss(MISS_UNREADABLE)
            raise
        self.metrics.hit()
        return ObjectRecord(self, key, meta["size"], meta["e_tag"], head[: meta["size"]])

    def contains(self, key: ChunkKey) -> bool:
        """Say whether there is a record of `key`."""
        try:
            with self._errors("read"):
                self._obstore.head(self._bucket, _name_of(key))
        except _AbsentError:
            return False
        return True

    def delete(self, key: ChunkKey) -> bool:
        """Remove a record and return whether there was one. Further reads of it are refused."""
        if not self.contains(key):
            return False
        with contextlib.suppress(_AbsentError), self._errors("delete from"):
            self._obstore.delete(self._bucket, _name_of(key))
        return True

    def sizes(self) -> Iterator[tuple[ChunkKey, int]]:
        """Iterate over keys and the bytes of their records, in no particular order."""
        with self._errors("list"):
            pages = iter(self._obstore.list(self._bucket))
        while True:
            with self._errors("list"):
                page = next(pages, None)
            if page is None:
                return
            for meta in page:
                match = _NAME.fullmatch(meta["path"])
                if match:
                    yield ChunkKey(match[2]), meta["size"]

    def close(self) -> None:
        """Do nothing: the library owns the connections."""

    def read_range(self, key: ChunkKey, first: int, end: int, tag: str | None) -> bytes:
        """Return a range of the object if it still has `tag`. Raises StoreError."""
        options: dict[str, Any] = {"range": (first, end)}
        if tag is not None:
            options["if_match"] = tag
        try:
            with self._errors("read"):
                return self._get(key, options)[0]
        except _AbsentError as error:
            raise StoreError(
                f"cannot read record {key} in {self.url}: it was deleted or replaced since it was "
                "opened; open it again"
            ) from error

    # -- private -----------------------------------------------------------------------------

    def _get(self, key: ChunkKey, options: dict[str, Any]) -> tuple[bytes, dict[str, Any]]:
        answer = self._obstore.get(self._bucket, _name_of(key), options=options)
        return answer.bytes().to_bytes(), answer.meta

    @contextlib.contextmanager
    def _errors(self, action: str) -> Iterator[None]:
        errors = self._errors_of
        try:
            yield
        except (errors.BaseError, FileNotFoundError) as error:
            text = _text_of(error)
            where = f"cannot {action} {self.url}"
            if "NoSuchBucket" in text or "ContainerNotFound" in text:
                raise StoreError(
                    f"{where}: there is no such bucket; make it, or check the name"
                ) from error
            if "TimeTooSkewed" in text:
                raise StoreError(
                    f"{where}: the clock of this machine differs too much from the server's; set it"
                ) from error
            if isinstance(
                error, FileNotFoundError | errors.NotFoundError | errors.PreconditionError
            ):
                raise _AbsentError(f"{where}: {text}") from error
            is_refused = isinstance(
                error, errors.PermissionDeniedError | errors.UnauthenticatedError
            ) or any(part in text for part in _REFUSALS)
            text = text[:_MOST_TEXT]
            if is_refused:
                raise StoreError(
                    f"{where}: access is refused ({text}); set {_CREDENTIALS[self._scheme]}, or "
                    "have the rights extended"
                ) from error
            raise StoreUnreachableError(
                f"{where}: {text}; check the endpoint and the network, then try again"
            ) from error


class _AbsentError(StoreError):
    """The object does not exist, or is not the one that was opened."""


def _check_endpoint(endpoint: str) -> None:
    """Raise ParameterError for an endpoint that is no server's URL; the library would panic."""
    try:
        parts = urlsplit(endpoint)
        is_server = parts.scheme in ("http", "https") and bool(parts.hostname)
        _ = parts.port  # Out of range, or no number: ValueError.
    except ValueError:
        is_server = False
    if not is_server or not endpoint.isascii() or not endpoint.isprintable() or " " in endpoint:
        raise ParameterError(
            f"endpoint is http://HOST:PORT or https://HOST:PORT; found {shown(endpoint)}"
        )


def _text_of(error: Exception) -> str:
    """Return a library error's message as one line, without its internals."""
    return " ".join(str(error).split("\n\nDebug source")[0].split())


def _is_range_refused(error: Exception) -> bool:
    text = str(error)
    return any(part in text for part in ("416", "InvalidRange", "out of range", "Range started"))


def _name_of(key: ChunkKey) -> str:
    return f"{key.digest[:2]}/{key.digest}.kv"
