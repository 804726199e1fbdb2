"""Records as objects in a bucket: Amazon S3 and compatible services, Google Cloud, Azure.

Each record is one object, ``PREFIX/ab/abcd...ef.kv``, read by ranges. An object is written whole or
not at all, so a killed writer leaves nothing. Every range is requested under the tag that the
object had when it was opened, so readers never see another object's bytes.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

from kvrag.chunk import ChunkKey
from kvrag.errors import RecordError, StoreError, StoreUnreachableError
from kvrag.store.bucket import DEFAULT_TIMEOUT_SECONDS, AbsentError, Bucket
from kvrag.store.metrics import MISS_ABSENT, MISS_UNREADABLE, StoreMetrics
from kvrag.store.remote import HeadedRecord, Options, RemoteStore, seconds

# The answer that opens a record brings this much: most records' header, or all of a small record.
_HEAD_BYTES = 16 << 10
# A read is broken off between two pieces.
_PIECE_BYTES = 16 << 10
_NAME = re.compile(r"([0-9a-f]{2})/(\1[0-9a-f]{38})\.kv")


class ObjectRecord(HeadedRecord):
    """An opened record of an `ObjectStore`."""

    def __init__(
        self, store: ObjectStore, key: ChunkKey, head: bytes, meta: Mapping[str, Any]
    ) -> None:
        super().__init__(key, meta["size"], head[: meta["size"]], store.metrics)
        self._store = store
        self._meta = meta
        self._is_cancelled = False

    def cancel(self) -> None:
        """Break off the reads of other threads at the next piece; they raise StoreError."""
        self._is_cancelled = True

    def _fetch(self, first: int, buffer: memoryview) -> None:
        num_read = self._store.read_range(
            self._key, first, buffer, self._meta, is_over=lambda: self._is_cancelled
        )
        if self._is_cancelled:
            raise StoreError(f"record {self._key}: reading it was broken off")
        if num_read != buffer.nbytes:
            raise RecordError(
                f"record {self._key} in {self._store.url}: expected {buffer.nbytes} bytes from "
                f"{first} on, found {num_read}; ingest its document again"
            )


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
        self._start(
            Bucket(url, endpoint=endpoint, region=region, timeout_seconds=timeout_seconds),
            must_answer,
        )

    def _start(self, bucket: Bucket, must_answer: bool) -> None:
        """Begin to use a bucket. Raises as the constructor does."""
        self.url = bucket.url
        self._bucket = bucket
        self.metrics = StoreMetrics(bucket.url.partition(":")[0])
        try:
            self._greet()
        except StoreUnreachableError:
            if must_answer:
                raise

    def _greet(self) -> None:
        self._bucket.check()

    def put(self, key: ChunkKey, record: bytes) -> None:
        """Write a record; an existing record stays. Raises StoreError.

        When two processes put one key at the same time, one of the records stays, whole.
        """
        if not self.contains(key):
            self.replace(key, record)

    def replace(self, key: ChunkKey, record: bytes) -> None:
        """Write a record in place of the existing one; further reads of that one are refused."""
        with self._bucket.errors("write to"):
            self._bucket.upload(_name_of(key), record)
        self.metrics.wrote(len(record))

    def open(self, key: ChunkKey) -> ObjectRecord | None:
        """Open a record for reading, or return None if there is none. Raises StoreError."""
        try:
            head, meta = self._get_head(key)
        except AbsentError:
            self.metrics.miss(MISS_ABSENT)
            return None
        except StoreError:
            self.metrics.miss(MISS_UNREADABLE)
            raise
        self.metrics.hit()
        return ObjectRecord(self, key, head, meta)

    def contains(self, key: ChunkKey) -> bool:
        """Say whether there is a record of `key`."""
        try:
            with self._bucket.errors("read"):
                self._bucket.obstore.head(self._bucket.client, _name_of(key))
        except AbsentError:
            return False
        return True

    def delete(self, key: ChunkKey) -> bool:
        """Remove a record and return whether there was one. Further reads of it are refused."""
        if not self.contains(key):
            return False
        with contextlib.suppress(AbsentError), self._bucket.errors("delete from"):
            self._bucket.obstore.delete(self._bucket.client, _name_of(key))
        return True

    def sizes(self) -> Iterator[tuple[ChunkKey, int]]:
        """Iterate over keys and the bytes of their records, in no particular order."""
        with self._bucket.errors("list"):
            pages = iter(self._bucket.obstore.list(self._bucket.client))
        while True:
            with self._bucket.errors("list"):
                page = next(pages, None)
            if page is None:
                return
            for meta in page:
                match = _NAME.fullmatch(meta["path"])
                if match:
                    yield ChunkKey(match[2]), meta["size"]

    def close(self) -> None:
        """Do nothing: the library owns the connections."""

    def read_range(
        self,
        key: ChunkKey,
        first: int,
        buffer: memoryview,
        meta: Mapping[str, Any],
        is_over: Callable[[], bool],
    ) -> int:
        """Fill `buffer` piece by piece until `is_over`; return how many bytes came.

        Parameters
        ----------
        key, first
            The record, and the first byte to read.
        meta
            What the server said of the object when it was opened: another one is refused.

        Raises
        ------
        StoreError
            When the object cannot be read, or is not the one that was opened.
        """
        num_read = 0
        options = {"range": (first, first + buffer.nbytes), **_unchanged_since(meta)}
        try:
            with self._bucket.errors("read"):
                answer = self._bucket.obstore.get(
                    self._bucket.client, _name_of(key), options=options
                )
                if answer.meta["e_tag"] != meta["e_tag"]:  # a server that ignores conditions
                    raise AbsentError("another tag")
                # The connection ends with the stream, which nothing holds after this function.
                for piece in answer.stream(min_chunk_size=_PIECE_BYTES):
                    if is_over():
                        break
                    found = memoryview(piece)[: buffer.nbytes - num_read]
                    buffer[num_read : num_read + found.nbytes] = found
                    num_read += found.nbytes
        except AbsentError as error:
            raise StoreError(
                f"cannot read record {key} in {self.url}: it was deleted or replaced since it was "
                "opened; open it again"
            ) from error
        return num_read

    # -- private -----------------------------------------------------------------------------

    def _get_head(self, key: ChunkKey) -> tuple[bytes, Mapping[str, Any]]:
        """Return an object's first bytes and what the server says about it."""
        with self._bucket.errors("read"):
            name, client = _name_of(key), self._bucket.client
            try:
                answer = self._bucket.obstore.get(client, name, options={"range": (0, _HEAD_BYTES)})
                return answer.bytes().to_bytes(), answer.meta
            except self._bucket.errors_of.BaseError as error:
                # An empty object has no range.
                if not _is_range_refused(error):
                    raise
                return b"", self._bucket.obstore.head(client, name)


def _unchanged_since(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return the condition that an object is the one that `meta` describes."""
    tag = meta["e_tag"]
    # A weak tag never matches (RFC 9110 section 13.1.1); some web servers send none.
    if tag and not tag.startswith("W/"):
        return {"if_match": tag}
    return {"if_unmodified_since": meta["last_modified"]}


def _is_range_refused(error: Exception) -> bool:
    text = str(error)
    return any(part in text for part in ("416", "InvalidRange", "out of range", "Range started"))


def _name_of(key: ChunkKey) -> str:
    return f"{key.digest[:2]}/{key.digest}.kv"
