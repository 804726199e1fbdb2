"""Records as objects in a bucket: Amazon S3 and compatible services, Google Cloud, Azure.

Each record is one object, ``PREFIX/ab/abcd...ef.kv``, read by ranges. An object is written whole or
not at all, so a killed writer leaves nothing. Every range is requested under the tag that the
object had when it was opened, so readers never see another object's bytes.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any, ClassVar

from kvrag.chunk import ChunkKey
from kvrag.errors import RecordError, StoreError, StoreUnreachableError
from kvrag.store.bucket import DEFAULT_TIMEOUT_SECONDS, AbsentError, Bucket
from kvrag.store.metrics import MISS_ABSENT, MISS_UNREADABLE, StoreMetrics
from kvrag.store.remote import HeadedRecord, Options, RemoteStore, seconds

# The answer that opens a record brings this much: most records' header, or all of a small record.
_HEAD_BYTES = 16 << 10
_NAME = re.compile(r"([0-9a-f]{2})/(\1[0-9a-f]{38})\.kv")


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
        bucket = Bucket(url, endpoint=endpoint, region=region, timeout_seconds=timeout_seconds)
        self.url = bucket.url
        self._bucket = bucket.client
        self._obstore = bucket.obstore
        self._upload = bucket.upload
        self._errors_of = bucket.errors_of
        self._errors = bucket.errors
        self.metrics = StoreMetrics(url.partition(":")[0])
        try:
            bucket.check()
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
            self._upload(_name_of(key), record)
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
        except AbsentError:
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
        except AbsentError:
            return False
        return True

    def delete(self, key: ChunkKey) -> bool:
        """Remove a record and return whether there was one. Further reads of it are refused."""
        if not self.contains(key):
            return False
        with contextlib.suppress(AbsentError), self._errors("delete from"):
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
        except AbsentError as error:
            raise StoreError(
                f"cannot read record {key} in {self.url}: it was deleted or replaced since it was "
                "opened; open it again"
            ) from error

    # -- private -----------------------------------------------------------------------------

    def _get(self, key: ChunkKey, options: dict[str, Any]) -> tuple[bytes, dict[str, Any]]:
        answer = self._obstore.get(self._bucket, _name_of(key), options=options)
        return answer.bytes().to_bytes(), answer.meta


def _is_range_refused(error: Exception) -> bool:
    text = str(error)
    return any(part in text for part in ("416", "InvalidRange", "out of range", "Range started"))


def _name_of(key: ChunkKey) -> str:
    return f"{key.digest[:2]}/{key.digest}.kv"
