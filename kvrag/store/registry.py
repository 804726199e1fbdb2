"""Stores by URL."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qsl

from kvrag.errors import ParameterError
from kvrag.store.base import Store
from kvrag.store.file import FileStore
from kvrag.store.memory import MemoryStore

_REDIS_SCHEMES = ("redis", "rediss", "unix")
_OBJECT_SCHEMES = ("s3", "gs", "az")
_EXPECTED = (
    "a store is file:PATH, file:///PATH, memory:, redis://HOST:PORT/DB, s3://BUCKET/PREFIX, "
    "gs://BUCKET/PREFIX or az://CONTAINER/PREFIX"
)


def open_store(url: str) -> Store:
    """Return the store at `url`.

    Parameters
    ----------
    url
        ``file:PATH`` (or ``file:///PATH``) for a folder, ``memory:`` for a new, empty store
        in this process; ``redis://``, ``rediss://`` and ``unix://`` for Redis, with options
        ``?prefix=NAME&timeout=SECONDS``; ``s3://``, ``gs://`` and ``az://`` for a bucket, with
        ``?endpoint=URL&region=NAME&timeout=SECONDS``.

    Raises
    ------
    ParameterError
        When the URL is of no known kind, or a library for it is not installed.
    StoreUnreachableError
        When the store does not answer.
    StoreError
        When it cannot be used.
    """
    scheme, colon, rest = url.partition(":")
    if not colon:
        raise ParameterError(f"{_EXPECTED}; found {url!r}")
    if scheme == "memory" and not rest:
        return MemoryStore()
    if scheme == "file" and rest:
        if not rest.startswith("//"):
            return FileStore(rest)
        if rest.startswith("///"):
            return FileStore("/" + rest.lstrip("/"))
    if scheme in _REDIS_SCHEMES and rest.startswith("//"):
        return _open_redis(url)
    if scheme in _OBJECT_SCHEMES and rest.startswith("//"):
        return _open_objects(url)
    raise ParameterError(f"{_EXPECTED}; found {_without_password(url)!r}")


def _open_redis(url: str) -> Store:
    from kvrag.store.redis import RedisStore

    place, query, options = _split(url, {"prefix": str, "timeout": _seconds})
    store = RedisStore(place, **options)
    store.url += query
    return store


def _open_objects(url: str) -> Store:
    from kvrag.store.objects import ObjectStore

    place, query, options = _split(url, {"endpoint": str, "region": str, "timeout": _seconds})
    store = ObjectStore(place, **options)
    store.url += query
    return store


def _split(url: str, known: dict[str, Callable[[str], object]]) -> tuple[str, str, dict[str, Any]]:
    """Return a URL without its options, these as written, and as keyword arguments."""
    place, _, query = url.partition("?")
    options: dict[str, Any] = {}
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError as error:
        raise ParameterError(
            f"{_without_password(place)}: options are name=value: {error}"
        ) from error
    for name, value in pairs:
        if name not in known:
            raise ParameterError(
                f"{_without_password(place)} has no option {name!r}; it has {', '.join(known)}"
            )
        try:
            argument = "timeout_seconds" if name == "timeout" else name
            options[argument] = known[name](value)
        except ValueError as error:
            raise ParameterError(f"{_without_password(place)}: {name}: {error}") from error
    return place, f"?{query}" if query else "", options


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 3600:
        raise ValueError(f"expected a number of seconds above 0, found {text!r}")
    return seconds


def _without_password(url: str) -> str:
    return re.sub(r"(://[^/@:]*):[^/@]*@", r"\1:***@", url)
