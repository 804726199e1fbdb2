"""A bucket: its connection, its errors in kvrag's words, and names that only one writer gets.

Amazon S3 and compatible services, Google Cloud, Azure; a folder too, as the bucket of one machine.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from kvrag.arguments import shown
from kvrag.errors import ParameterError, StoreError, StoreUnreachableError
from kvrag.plugins import require
from kvrag.store.remote import upload_seconds

SCHEMES = ("s3", "gs", "az")
WEB = ("http", "https")
"""Schemes of web servers, which this only reads (`kvrag.store.objects`)."""

TOKEN_VARIABLE = "KVRAG_KV_TOKEN"
"""Environment variable with the token for a web server."""

DEFAULT_TIMEOUT_SECONDS = 5.0

_MAX_RETRIES = 2
_LEAST_UPLOAD_BYTES = 1 << 20
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
        if num_bytes < _LEAST_UPLOAD_BYTES or self._scheme == "file":
            return self.client
        most_bytes = 1 << num_bytes.bit_length()  # few sizes, so few clients
        with self._lock:
            if most_bytes not in self._uploading:
                seconds = upload_seconds(self._timeout_seconds, most_bytes)
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
            where = f"cannot {action} {self.url}"
            if "NoSuchBucket" in text or "ContainerNotFound" in text:
                raise StoreError(
                    f"{where}: there is no such bucket; make it, or check the name"
                ) from error
            if "InvalidCertificate(" in str(error):
                raise StoreError(
                    f"{where}: its certificate is not trusted; name the file of who signed it: "
                    "?ca=FILE"
                ) from error
            if "TimeTooSkewed" in text:
                raise StoreError(
                    f"{where}: the clock of this machine differs too much from the server's; set it"
                ) from error
            if isinstance(
                error, FileNotFoundError | errors.NotFoundError | errors.PreconditionError
            ):
                raise AbsentError(f"{where}: {text}") from error
            is_refused = isinstance(
                error, errors.PermissionDeniedError | errors.UnauthenticatedError
            ) or any(part in text for part in _REFUSALS)
            text = text[:_MOST_TEXT]
            if isinstance(error, errors.NotSupportedError):
                raise StoreError(
                    f"{where}: {text}; use a server that answers requests for a range"
                ) from error
            if is_refused:
                needed = _CREDENTIALS.get(self._scheme, "the folder's permissions")
                raise StoreError(
                    f"{where}: access is refused ({text}); set {needed}, or have the rights "
                    "extended"
                ) from error
            raise StoreUnreachableError(
                f"{where}: {text}; check the endpoint and the network, then try again"
            ) from error


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
        _check_endpoint(endpoint)
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


def _tag_of(meta: Mapping[str, Any]) -> str:
    return str(meta["e_tag"] or meta["last_modified"])


def _text_of(error: Exception) -> str:
    """Return a library error's message as one line, without its internals."""
    return " ".join(str(error).split("\n\nDebug source")[0].split())
