"""Records that a web server serves from a folder: ``http://HOST/PREFIX/ab/abcd...ef.kv``.

Any static server does that knows ranges (nginx, Caddy, Apache). It serves the folder of a
`kvrag.store.file.FileStore`, or a copy of a bucket; both have the same names. It is only read.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, NoReturn
from urllib.parse import urlsplit

from kvrag.arguments import shown
from kvrag.chunk import ChunkKey
from kvrag.errors import ParameterError, StoreError
from kvrag.regularfile import read_regular
from kvrag.store.bucket import DEFAULT_TIMEOUT_SECONDS, TOKEN_VARIABLE, WEB, AbsentError, Bucket
from kvrag.store.objects import ObjectStore
from kvrag.store.remote import Options, file_path, seconds

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
        environment's (`kvrag.store.bucket.TOKEN_VARIABLE`), if any.
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
        scheme = _checked_scheme(url)
        client: dict[str, Any] = {"allow_http": scheme == "http"}
        if token := _token(token_file):
            client["default_headers"] = {"Authorization": f"Bearer {token}"}
        if ca is not None:
            if scheme == "http":
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
        with contextlib.suppress(AbsentError), self._bucket.errors("open"):
            found = self._bucket.obstore.get(self._bucket.client, _ABOUT)
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


def _checked_scheme(url: str) -> str:
    """Return a URL's scheme. Raises ParameterError."""
    try:
        parts = urlsplit(url)
        # As the name will be looked up; a port that is no number raises too.
        _, host = parts.port, (parts.hostname or "").encode("idna")
    except ValueError as error:
        raise ParameterError(f"{shown(url)} is no URL: {error}") from error
    if not all("!" <= character <= "~" for character in parts.path):
        raise ParameterError(f"{shown(url)} is no URL: its path holds more than visible ASCII")
    if parts.scheme not in WEB or not host or parts.query or parts.fragment:
        raise ParameterError(
            f"a server is http://HOST:PORT or https://HOST:PORT; found {shown(url)}"
        )
    if parts.username is not None or parts.password is not None:
        raise ParameterError(
            f"{parts.scheme}://{parts.hostname}: a URL is seen by others: put the token in "
            f"{TOKEN_VARIABLE}, or in a file: ?token_file=PATH"
        )
    return parts.scheme


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
        token = os.environ.get(TOKEN_VARIABLE, "")
        return _checked_token(token, TOKEN_VARIABLE) if token else ""
    try:
        token = read_regular(path).decode().strip()
        mode = Path(path).stat().st_mode
    except (OSError, ValueError) as error:
        raise ParameterError(
            f"{path} is not a file with a token: "
            f"{getattr(error, 'strerror', None) or 'it holds something else'}; make one with "
            "'openssl rand -hex 32'"
        ) from error
    if os.name == "posix" and mode & (stat.S_IRGRP | stat.S_IROTH):
        raise ParameterError(
            f"{path}: other users may read this token; take that right away (chmod 600)"
        )
    return _checked_token(token, str(path))


def _checked_token(token: str, where: str) -> str:
    if not token or not all("!" <= character <= "~" for character in token):
        raise ParameterError(
            f"{where}: a token is one line of visible ASCII characters; make one with "
            "'openssl rand -hex 32'"
        )
    return token
