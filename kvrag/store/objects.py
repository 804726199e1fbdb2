"""Records as objects in a bucket: Amazon S3 and compatible services, Google Cloud, Azure.

Each record is one object, ``PREFIX/ab/abcd...ef.kv``, read by ranges. An object is written whole or
not at all, so a killed writer leaves nothing. Every range is requested under the tag that the
object had when it was opened, so readers never see another object's bytes.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any, ClassVar, NoReturn
from urllib.parse import SplitResult, urlsplit

from kvrag.arguments import shown
from kvrag.chunk import ChunkKey
from kvrag.errors import ParameterError, RecordError, StoreError, StoreUnreachableError
from kvrag.plugins import require
from kvrag.regularfile import read_regular
from kvrag.store.base import counted
from kvrag.store.file import read_secret
from kvrag.store.metrics import StoreMetrics
from kvrag.store.remote import (
    HeadedRecord,
    Options,
    RemoteStore,
    file_path,
    seconds,
)

SCHEMES = ("s3", "gs", "az")
WEB = ("http", "https")
"""Schemes of web servers, which this only reads (`kvrag.store.objects`)."""

TOKEN_VARIABLE = "KVRAG_KV_TOKEN"
"""Environment variable with the token for a web server."""

DEFAULT_TIMEOUT_SECONDS = 5.0

_MAX_RETRIES = 2
# For each of these, an upload may take the timeout once more.
_UPLOAD_BYTES = 1 << 20
# The library reports a missing permission only in words, whatever the operation.
_REFUSALS = ("403 Forbidden", "401 Unauthorized", "InvalidAccessKeyId", "redential")
_MOST_TEXT = 300
# Names of the options for region, endpoint and permission to do without TLS, by kind of bucket.
_CONFIG = {"s3": "aws_", "gs": "google_", "az": "azure_"}
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
# What the library reads itself: a server, then an account. A bucket's name is unique in these.
_SERVERS = {
    "s3": (*_ENDPOINTS, "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT", "AZURE_STORAGE_USE_EMULATOR"),
}
_ACCOUNTS = {"az": "AZURE_STORAGE_ACCOUNT_NAME"}
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_SERVICE_ACCOUNT",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
    **dict.fromkeys(WEB, f"{TOKEN_VARIABLE}, or name the token's file (?token_file=PATH)"),
}


class AbsentError(StoreError):
    """The object does not exist, or is not the one that was opened."""


class Bucket:
    """A bucket, or a part of one. Safe to use from several threads.

    The library finds credentials where the provider's own tools do: in the environment, or in the
    metadata of one of the provider's machines.

    Parameters
    ----------
    url
        ``s3://BUCKET[/PREFIX]``, ``gs://BUCKET[/PREFIX]`` or ``az://CONTAINER[/PREFIX]``; also
        ``file:///FOLDER``, which is created.
    endpoint
        URL of another server that speaks the same protocol (MinIO, Ceph, an emulator). For S3,
        None takes AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL from the environment, if set.
    region
        Region of an S3 bucket; None takes the environment's.
    timeout_seconds
        How long a server may send nothing before it counts as unreachable. An upload may take as
        long for each MiB.
    client
        More of the library's options for its HTTP client.

    Attributes
    ----------
    client, obstore, errors_of
        The library's store, the library, and its module of exceptions.

    Raises
    ------
    ParameterError
        When the URL is invalid, or the library ``obstore`` is not installed.
    """

    def __init__(
        self,
        url: str,
        *,
        endpoint: str | None = None,
        region: str | None = None,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        client: Mapping[str, Any] | None = None,
    ) -> None:
        self.obstore = require("obstore", "objects")
        self.errors_of = require("obstore.exceptions", "objects")
        stores = require("obstore.store", "objects")
        scheme, _, place = url.partition("://")
        if scheme not in (*SCHEMES, *WEB, "file") or not place.strip("/"):
            known = ", ".join(f"{name}://BUCKET/PREFIX" for name in SCHEMES)
            raise ParameterError(f"a bucket is {known}; found {shown(url)}")
        self.url = url.rstrip("/")
        self._scheme = scheme
        # Told by its class: the library takes some names of web servers for buckets.
        make = stores.HTTPStore if scheme in WEB else stores.from_url
        self._make: Callable[[float], Any] = lambda seconds: make(
            self.url, **_connection(scheme, endpoint, region, seconds, client or {})
        )
        self._timeout_seconds = timeout_seconds
        self._uploading: dict[int, Any] = {}
        self._lock = threading.Lock()
        try:
            if scheme == "file":
                self.client = stores.LocalStore(place, mkdir=True)
            else:
                self.client = self._make(timeout_seconds)
        except (self.errors_of.BaseError, ValueError, OSError) as error:
            told = f", and {_CREDENTIALS[scheme]} set" if scheme in _CREDENTIALS else ""
            raise ParameterError(
                f"not a bucket of {scheme}: {_text_of(error)}; expected {scheme}://BUCKET/PREFIX"
                f"{told}"
            ) from error

    def upload(self, name: str, content: bytes, **options: Any) -> None:
        """Write an object with the library's options. Its errors are the library's."""
        self.obstore.put(self._client_for(len(content)), name, content, **options)

    def check(self) -> None:
        """Raise StoreError unless the bucket answers and lets this process in."""
        with self.errors("open"):
            for _ in self.obstore.list(self.client, chunk_size=1):
                break

    def names(self, behind: str | None = None) -> list[str]:
        """Return the names of all objects, sorted; only those after one, if it is given."""
        with self.errors("list"):
            found = [
                meta["path"]
                for page in self.obstore.list(self.client, offset=behind)
                for meta in page
            ]
        return sorted(found)

    def get(self, name: str) -> bytes | None:
        """Return an object's bytes, or None if there is none. Raises StoreError."""
        found = self.get_tagged(name)
        return None if found is None else found[0]

    def get_tagged(self, name: str) -> tuple[bytes, str] | None:
        """Return an object's bytes and its tag, as `get` and `tag` do."""
        try:
            with self.errors("read"):
                answer = self.obstore.get(self.client, name)
                return bytes(answer.bytes()), _tag_of(answer.meta)
        except AbsentError:
            return None

    def tag(self, name: str) -> str | None:
        """Return what changes when an object is replaced, or None if there is none.

        Raises StoreError.
        """
        try:
            with self.errors("read"):
                return _tag_of(self.obstore.head(self.client, name))
        except AbsentError:
            return None

    def create(self, name: str, content: bytes) -> bool:
        """Write an object unless there is one of that name; return whether it was written.

        The server decides: of several writers at once, one succeeds. If an answer is lost on the
        way, a repeated request is refused although the first one wrote: read what is there.
        """
        with self.errors("write to"):
            try:
                self.upload(name, content, mode="create")
            except self.errors_of.AlreadyExistsError:
                return False
        return True

    def put(self, name: str, content: bytes) -> None:
        """Write an object in place of any of that name."""
        with self.errors("write to"):
            self.upload(name, content)

    def delete(self, name: str) -> None:
        """Remove an object, if there is one."""
        with contextlib.suppress(AbsentError), self.errors("delete from"):
            self.obstore.delete(self.client, name)

    def _client_for(self, num_bytes: int) -> Any:
        """Return a client that waits as long as an upload of that size may take."""
        if num_bytes < _UPLOAD_BYTES or self._scheme == "file":
            return self.client
        most_bytes = 1 << num_bytes.bit_length()  # few sizes, so few clients
        with self._lock:
            if most_bytes not in self._uploading:
                # The answer follows the upload, so its time looks like a server's silence.
                seconds = self._timeout_seconds * (1 + most_bytes / _UPLOAD_BYTES)
                self._uploading[most_bytes] = self._make(seconds)
            return self._uploading[most_bytes]

    @contextlib.contextmanager
    def errors(self, action: str) -> Iterator[None]:
        """Translate the library's errors in a block that does `action`."""
        errors = self.errors_of
        try:
            yield
        except (errors.BaseError, FileNotFoundError) as error:
            text = _text_of(error)
            short, kind = text[:_MOST_TEXT], StoreError
            if "NoSuchBucket" in text or "ContainerNotFound" in text:
                why = "there is no such bucket; make it, or check the name"
            elif "InvalidCertificate(" in str(error):
                why = "its certificate is not trusted; name the file of who signed it: ?ca=FILE"
            elif "TimeTooSkewed" in text:
                why = "the clock of this machine differs too much from the server's; set it"
            elif isinstance(
                error, FileNotFoundError | errors.NotFoundError | errors.PreconditionError
            ):
                kind, why = AbsentError, text
            elif isinstance(error, errors.NotSupportedError):
                why = f"{short}; use a server that answers requests for a range"
            elif isinstance(
                error, errors.PermissionDeniedError | errors.UnauthenticatedError
            ) or any(part in text for part in _REFUSALS):
                needed = _CREDENTIALS.get(self._scheme, "the folder's permissions")
                why = f"access is refused ({short}); set {needed}, or have the rights extended"
            else:
                kind = StoreUnreachableError
                why = f"{short}; check the endpoint and the network, then try again"
            raise kind(f"cannot {action} {self.url}: {why}") from error


def server_of(scheme: str, endpoint: str | None) -> str:
    """Return what tells apart two buckets of one name: server and account; "" for the provider's.

    Parameters
    ----------
    endpoint
        As for `Bucket`.
    """
    named = filter(None, map(os.environ.get, _SERVERS.get(scheme, ())))
    server = (endpoint or next(named, "")).rstrip("/")
    account = os.environ.get(_ACCOUNTS.get(scheme, ""), "")
    return f"{server} {account}".strip()


def _connection(
    scheme: str,
    endpoint: str | None,
    region: str | None,
    timeout_seconds: float,
    client: Mapping[str, Any],
) -> dict[str, Any]:
    config: dict[str, Any] = {}
    if endpoint is None and scheme == "s3":
        # As the provider's own tools: without TLS where the endpoint's URL says so.
        named = map(os.environ.get, _ENDPOINTS)
        endpoint = next(filter(None, named), None)
    if endpoint is not None:
        _check_server(endpoint, "endpoint")
        name = "base_url" if scheme == "gs" else "endpoint"
        config[f"{_CONFIG[scheme]}{name}"] = endpoint
    if region is not None:
        config["aws_region"] = region
    timeout = timedelta(seconds=timeout_seconds)
    return {
        **({"config": config} if config else {}),
        "client_options": {
            "allow_http": endpoint is not None and endpoint.startswith("http:"),
            "connect_timeout": timeout,
            # Limits silence, not a whole request: a large range on a slow line is fine.
            "read_timeout": timeout,
            "timeout": timedelta(seconds=60 * timeout_seconds),
            **client,
        },
        "retry_config": {
            "max_retries": _MAX_RETRIES,
            "retry_timeout": 2 * timeout,
            "backoff": {
                "base": 2,
                "init_backoff": timedelta(milliseconds=50),
                "max_backoff": timeout,
            },
        },
    }


def _check_server(url: str, noun: str) -> SplitResult:
    """Return the parts of a server's URL. Raises ParameterError; the library would panic."""
    try:
        parts = urlsplit(url)
        # As the name will be looked up; a port that is no number raises too.
        _, host = parts.port, (parts.hostname or "").encode("idna")
        if parts.scheme in WEB and host and all("!" <= letter <= "~" for letter in url):
            return parts
    except ValueError:
        pass
    found = shown(re.sub("//.*@", "//***@", url, flags=re.DOTALL))  # no password
    raise ParameterError(
        f"{noun} is http://HOST:PORT or https://HOST:PORT in visible ASCII; found {found}"
    )


def _tag_of(meta: Mapping[str, Any]) -> str:
    return str(meta["e_tag"] or meta["last_modified"])


def _text_of(error: Exception) -> str:
    """Return a library error's message as one line, without its internals."""
    return " ".join(str(error).split("\n\nDebug source")[0].split())


# The answer that opens a record brings this much: most records' header, or all of a small record.
_HEAD_BYTES = 16 << 10
# An empty object has no range.
_RANGE_REFUSALS = ("416", "InvalidRange", "out of range", "Range started")
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
        store, meta, num_read = self._store, self._meta, 0
        options = {"range": (first, first + buffer.nbytes), **_unchanged_since(meta)}
        try:
            with store.bucket.errors("read"):
                answer = store.bucket.obstore.get(
                    store.bucket.client, _name_of(self._key), options=options
                )
                if answer.meta["e_tag"] != meta["e_tag"]:  # a server that ignores conditions
                    raise AbsentError("another tag")
                # The connection ends with the stream, which nothing holds after this function.
                for piece in answer.stream(min_chunk_size=_PIECE_BYTES):
                    if self._is_cancelled:
                        raise StoreError(f"record {self._key}: reading it was broken off")
                    found = memoryview(piece)[: buffer.nbytes - num_read]
                    buffer[num_read : num_read + found.nbytes] = found
                    num_read += found.nbytes
        except AbsentError as error:
            raise StoreError(
                f"cannot read record {self._key} in {store.url}: it was deleted or replaced since "
                "it was opened; open it again"
            ) from error
        if num_read != buffer.nbytes:
            raise RecordError(
                f"record {self._key} in {store.url}: expected {buffer.nbytes} bytes from {first} "
                f"on, found {num_read}; ingest its document again"
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
        self.bucket = bucket
        self.metrics = StoreMetrics(bucket.url.partition(":")[0])
        try:
            self._greet()
        except StoreUnreachableError:
            if must_answer:
                raise

    def _greet(self) -> None:
        self.bucket.check()

    def replace(self, key: ChunkKey, record: bytes) -> None:
        """Write a record in place of the existing one; further reads of that one are refused."""
        self.bucket.put(_name_of(key), record)
        self.metrics.wrote(len(record))

    @counted
    def open(self, key: ChunkKey) -> ObjectRecord | None:
        """Open a record for reading, or return None if there is none. Raises StoreError."""
        bucket, name = self.bucket, _name_of(key)
        try:
            with bucket.errors("read"):
                try:
                    options = {"range": (0, _HEAD_BYTES)}
                    answer = bucket.obstore.get(bucket.client, name, options=options)
                    head, meta = answer.bytes().to_bytes(), answer.meta
                except bucket.errors_of.BaseError as error:
                    if not any(part in str(error) for part in _RANGE_REFUSALS):
                        raise
                    head, meta = b"", bucket.obstore.head(bucket.client, name)
        except AbsentError:
            return None
        return ObjectRecord(self, key, head, meta)

    def contains(self, key: ChunkKey) -> bool:
        """Say whether there is a record of `key`."""
        return self.bucket.tag(_name_of(key)) is not None

    def delete(self, key: ChunkKey) -> bool:
        """Remove a record and return whether there was one. Further reads of it are refused."""
        is_there = self.contains(key)
        if is_there:
            self.bucket.delete(_name_of(key))
        return is_there

    def sizes(self) -> Iterator[tuple[ChunkKey, int]]:
        """Iterate over keys and the bytes of their records, in no particular order."""
        with self.bucket.errors("list"):
            pages = iter(self.bucket.obstore.list(self.bucket.client))
        while True:
            with self.bucket.errors("list"):
                page = next(pages, None)
            if page is None:
                return
            for meta in page:
                match = _NAME.fullmatch(meta["path"])
                if match:
                    yield ChunkKey(match[2]), meta["size"]

    def close(self) -> None:
        """Do nothing: the library owns the connections."""


def _unchanged_since(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return the condition that an object is the one that `meta` describes."""
    tag = meta["e_tag"]
    # A weak tag never matches (RFC 9110 section 13.1.1); some web servers send none.
    if tag and not tag.startswith("W/"):
        return {"if_match": tag}
    return {"if_unmodified_since": meta["last_modified"]}


def _name_of(key: ChunkKey) -> str:
    return f"{key.digest[:2]}/{key.digest}.kv"


# Records that a web server serves from a folder: ``http://HOST/PREFIX/ab/abcd...ef.kv``.
#
# Any static server does that knows ranges (nginx, Caddy, Apache). It serves the folder of a
# `kvrag.store.file.FileStore`, or a copy of a bucket; both have the same names. It is only read.


# What a server of `kvrag serve-kv`, which 0.2 had, says about itself.
_ABOUT, _ABOUT_KVRAG = "v1", b'{"service": "kvrag"'


class HttpStore(ObjectStore):
    """Records on a web server, which this reads and never writes.

    Parameters
    ----------
    url
        ``http://HOST[:PORT][/PREFIX]`` or ``https://...``.
    token_file
        File with a token that each request carries (``Authorization: Bearer``); None uses the
        environment's (`kvrag.store.objects.TOKEN_VARIABLE`), if any.
    ca
        File of certificates to trust beside the system's, in PEM format.
    timeout_seconds
        How long a server may send nothing before it counts as unreachable.
    must_answer
        Raise if the server is unreachable now; otherwise it may become reachable later.

    Raises
    ------
    ParameterError
        When the URL, token or certificates are invalid, or ``obstore`` is not installed.
    StoreUnreachableError
        When the server does not answer.
    StoreError
        When the server refuses access, or is one of ``kvrag serve-kv``.
    """

    options: ClassVar[Options] = {
        "token_file": ("token_file", file_path),
        "ca": ("ca", file_path),
        "timeout": ("timeout_seconds", seconds),
    }

    def __init__(
        self,
        url: str,
        *,
        token_file: str | None = None,
        ca: str | None = None,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        must_answer: bool = True,
    ) -> None:
        parts = _check_server(url, "a server")
        if parts.query or parts.fragment or "@" in parts.netloc:
            raise ParameterError(
                f"{parts.scheme}://{parts.hostname}: a server is http://HOST:PORT/PATH and nothing "
                f"else, as a URL is seen by others: put the token in {TOKEN_VARIABLE}, or in a "
                "file: ?token_file=PATH"
            )
        client: dict[str, Any] = {"allow_http": parts.scheme == "http"}
        if token := _token(token_file):
            client["default_headers"] = {"Authorization": f"Bearer {token}"}
        if ca is not None:
            if parts.scheme == "http":
                raise ParameterError(f"{url}: 'ca' is of https:// only: http:// is not encrypted")
            client["root_certificate"] = _certificates(ca)
        self._start(Bucket(url, timeout_seconds=timeout_seconds, client=client), must_answer)

    def replace(self, key: ChunkKey, record: bytes) -> None:
        """Refuse. Raises StoreError."""
        self._refuse(f"write record {key} ({len(record)} bytes)")

    def delete(self, key: ChunkKey) -> bool:
        """Refuse, unless there is no such record. Raises StoreError."""
        if self.contains(key):
            self._refuse(f"delete record {key}")
        return False

    def sizes(self) -> Iterator[tuple[ChunkKey, int]]:
        """Refuse: web servers have no list. Raises StoreError."""
        self._refuse("list the records")

    # -- private -----------------------------------------------------------------------------

    def _greet(self) -> None:
        answer = b""
        with contextlib.suppress(AbsentError), self.bucket.errors("open"):
            found = self.bucket.obstore.get(self.bucket.client, _ABOUT)
            answer = next(iter(found.stream(min_chunk_size=1)), b"")
        if bytes(answer).startswith(_ABOUT_KVRAG):
            raise StoreError(
                f"{self.url} is a server of 'kvrag serve-kv', which this version does not read: "
                "let any web server serve the folder of records, or use Redis or a bucket"
            )

    def _refuse(self, action: str) -> NoReturn:
        raise StoreError(
            f"cannot {action} in {self.url}: a web server is only read; name the folder or bucket "
            "that it serves"
        )


def _certificates(path: str) -> bytes:
    try:
        content = read_regular(path)
    except OSError as error:
        raise ParameterError(f"{path}: no certificates in PEM format ({error.strerror})") from error
    if b"-----BEGIN CERTIFICATE-----" not in content:
        raise ParameterError(f"{path}: no certificates in PEM format")
    return content


def _token(path: str | None) -> str:
    """Return the token from a file, or from the environment if `path` is None; "" if there is none.

    Raises
    ------
    ParameterError
        When the file cannot be read or other users may read it, or when the token is empty or holds
        characters other than visible ASCII.
    """
    if path is None:
        token, where = os.environ.get(TOKEN_VARIABLE, ""), TOKEN_VARIABLE
    else:
        token, where = read_secret(path, "token"), path
    if not all("!" <= letter <= "~" for letter in token) or (path and not token):
        raise ParameterError(
            f"{where}: a token is one line of visible ASCII characters; make one with "
            "'openssl rand -hex 32'"
        )
    return token
