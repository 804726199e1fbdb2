"""Stores by URL."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote_plus

from kvrag import arguments
from kvrag.errors import ParameterError
from kvrag.plugins import Table, require_subclass
from kvrag.store.base import Store, capability, is_in_memory
from kvrag.store.encrypted import EncryptedStore, read_key
from kvrag.store.file import FileStore
from kvrag.store.limited import LimitedStore
from kvrag.store.memory import MemoryStore
from kvrag.store.remote import GuardedStore, Options, RemoteStore, file_path, unreachable
from kvrag.store.tiered import TieredStore

REMOTE: Table[type[RemoteStore]] = Table(
    "kvrag.stores",
    {
        "redis": "kvrag.store.redis:RedisStore",
        "rediss": "kvrag.store.redis:RedisStore",
        "unix": "kvrag.store.redis:RedisStore",
        "s3": "kvrag.store.objects:ObjectStore",
        "gs": "kvrag.store.objects:ObjectStore",
        "az": "kvrag.store.objects:ObjectStore",
        "http": "kvrag.store.objects:HttpStore",
        "https": "kvrag.store.objects:HttpStore",
    },
)
"""Store classes for URLs with ``//``, by scheme."""

_EXPECTED = (
    "a store is file:PATH, file:///PATH, memory:, redis://HOST:PORT/DB, s3://BUCKET/PREFIX, "
    "gs://BUCKET/PREFIX, az://CONTAINER/PREFIX, http://HOST/PATH or tiered:URL|URL"
)
_LOCAL = re.compile(r"memory:|file:(?!//(?!/)).+", re.DOTALL)
# An option that names a key, in a place where it would be part of a folder's or a prefix's name.
_STRAY_KEY = re.compile(r"([&;,#\s][\w.-]*key[\w.-]*|key[\s_.-]*file)\s*=", re.IGNORECASE)


def open_store(url: str, *, must_answer: bool = True) -> Store:
    """Open the store at `url`.

    Parameters
    ----------
    url
        ``file:PATH`` (or ``file:///PATH``) for a folder, ``memory:`` for a new, empty store
        in this process; ``redis://``, ``rediss://`` and ``unix://`` for Redis, with options
        ``?prefix=NAME&timeout=SECONDS``; ``s3://``, ``gs://`` and ``az://`` for a bucket, with
        ``?endpoint=URL&region=NAME&timeout=SECONDS``; ``http://`` and ``https://`` for a web
        server, which is only read, with ``?token_file=PATH&ca=PATH&timeout=SECONDS``.

        Each takes ``limit=BYTES`` (``20GB``, ``512MiB``), beyond which the least recently used
        records are removed, and ``key_file=PATH``, a file with the key that encrypts records.

        The first ``?`` begins the options, so a URL cannot name a folder with ``?`` in its name.

        ``tiered:URL|URL|URL`` reads from the first store that has a record. Writes go to the last
        one, by way of the ``file:`` store before it if there is one.
    must_answer
        Raise if a remote store is unreachable now; otherwise it may become reachable later.

    Raises
    ------
    ParameterError
        When the kind of URL or an option is unknown, or a library for it is not installed.
    StoreUnreachableError
        When the store does not answer.
    StoreError
        When the store cannot be used.
    """
    check_kind(url)
    scheme, _, rest = url.partition(":")
    if scheme == "tiered":
        return _open_tiers(rest.split("|"), must_answer)
    place, _, query = url.partition("?")
    is_local = scheme in ("file", "memory")
    kind = None if is_local else store_class(scheme)
    own, common = parse_options(url, {} if kind is None else kind.options)
    store: Store
    if kind is not None:
        store = _open_remote(kind, place, query, must_answer, own)
    elif scheme == "memory":
        store = MemoryStore()
    else:
        store = FileStore(_folder_of(place))
    if "key_file" in common:
        store = EncryptedStore(store, read_key(common["key_file"]), common["key_file"])
    if "limit" in common:
        store = LimitedStore(store, common["limit"])
    return store


def _open_remote(
    kind: type[RemoteStore], place: str, query: str, must_answer: bool, options: dict[str, Any]
) -> GuardedStore:
    # The wrappers write the options that all stores have into the URL.
    said = [
        one for one in query.split("&") if unquote_plus(one.partition("=")[0]) not in COMMON_OPTIONS
    ]
    try:
        opened = kind(place, must_answer=must_answer, **options)
    except OSError as error:
        raise unreachable(without_password(place), error) from error
    return GuardedStore(opened, "&".join(said))


def store_class(scheme: str) -> type[RemoteStore]:
    """Return the class that opens URLs of a scheme that is in `REMOTE`.

    Raises
    ------
    ParameterError
        When another distribution registers the class, and it cannot be used.
    """
    found = REMOTE[scheme]
    require_subclass(REMOTE, scheme, found, RemoteStore)
    return found


def check_kind(url: str) -> None:
    """Raise ParameterError unless the kind of a URL is known; this opens nothing."""
    if not isinstance(url, str):
        raise ParameterError(f"{_EXPECTED}; found {arguments.shown(url)}")
    scheme, _, rest = url.partition(":")
    is_known = (
        (scheme == "tiered" and ":" in url)
        or _LOCAL.fullmatch(url.partition("?")[0]) is not None
        or (rest.startswith("//") and scheme in REMOTE)
    )
    if not is_known:
        hint = "; mooncake:// is a distribution of its own, in examples/mooncake of the repository"
        raise ParameterError(
            f"{_EXPECTED}; found {arguments.shown(without_password(url))}"
            f"{hint if scheme == 'mooncake' else ''}"
        )


def _folder_of(place: str) -> Path:
    """Return the folder in ``file:PATH`` or ``file:///PATH``. Raises ParameterError."""
    path = place.partition(":")[2]
    path = "/" + path.lstrip("/") if path.startswith("///") else path
    folder = arguments.path(path, "file:").absolute()
    if "?" in str(folder):  # its URL could not be opened again
        raise ParameterError(
            f"{folder}: '?' begins the options of a URL, so no URL can name this folder; use "
            "another one"
        )
    return folder


def _open_tiers(urls: list[str], must_answer: bool) -> Store:
    if len(urls) < 2 or any(url.startswith("tiered:") for url in urls):
        raise ParameterError(
            "tiers are two stores or more, tiered:URL|URL, the fastest first; found "
            + repr("|".join(map(without_password, urls)))
        )
    for url in urls:
        check_kind(url)
    tiers: list[Store] = []
    try:
        for url in urls:
            tiers.append(open_store(url, must_answer=must_answer))
            # Copies from a store to itself would be pointless.
            place = tiers[-1].url.partition("?")[0]
            others = [tier.url.partition("?")[0] for tier in tiers[:-1]]
            if place in others and not is_in_memory(tiers[-1]):
                raise ParameterError(f"{place} is two of the tiers: name each store once")
        disk = capability(tiers[-2], FileStore)
        return TieredStore(tiers, outbox_folder=None if disk is None else disk.path)
    except BaseException:
        for tier in tiers:
            tier.close()
        raise


def parse_options(
    url: str, own: Options, of_all: Options | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a store's own options as keyword arguments, and those that all stores have.

    Raises ParameterError for options that are neither `own` nor `of_all` (`COMMON_OPTIONS`).
    """
    of_all = COMMON_OPTIONS if of_all is None else of_all
    known = {**own, **of_all}
    whole_place = without_password(url).partition("?")[0]
    place = arguments.cut(whole_place)
    found: dict[str, Any] = {}
    form = f"options are NAME=VALUE, after the only '?' and with & between: {', '.join(known)}"
    _, mark, query = url.partition("?")
    try:
        # A lone "?" would be dropped: a folder of that name would be another one.
        pairs = parse_qsl(query or mark, keep_blank_values=True, strict_parsing=True)
    except ValueError as error:
        raise ParameterError(f"{place}: {form}") from error
    # A key that is taken for a part of a name would leave the records without encryption.
    values = (value for name, value in pairs if name in own)
    if any(map(_STRAY_KEY.search, [whole_place, *values])):
        raise ParameterError(
            f"{place}: {form}; found a key before the '?' or inside another option's value"
        )
    for name, value in pairs:
        if name not in known:
            raise ParameterError(
                f"{place} has no option {arguments.shown(name)}; it has {', '.join(known)}"
            )
        argument, parse = known[name]
        if argument in found:
            raise ParameterError(f"{place}: {name} is given twice")
        try:
            found[argument] = parse(value)
        except ValueError as error:
            raise ParameterError(f"{place}: {name}: {error}") from error
    common = {name: found.pop(name) for name in of_all if name in found}
    return found, common


def parse_bytes(text: str, where: str = "") -> int:
    """Return the number of bytes in a text: ``20GB``, ``512 MiB``, ``1e9``.

    Raises ParameterError, whose message begins with `where`.
    """
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*(?:([kKMGT])(i?))?B?\s*", text)
    try:
        number = float(match[1]) if match else 0.0
    except ValueError:
        number = 0.0
    if match and match[2]:
        number *= (1024 if match[3] else 1000) ** ("kMGT".index(match[2].replace("K", "k")) + 1)
    if not 1 <= number < 1e18:
        raise ParameterError(
            f"{where}expected bytes as in 20GB or 512MiB, found {arguments.shown(text)}"
        )
    return int(number)


def without_password(url: str) -> str:
    """Return a URL with stars in place of its password, even if the URL is malformed."""
    masked = re.sub(r"(://[^/@:|]*):[^|]*@", r"\1:***@", url)
    return re.sub(r"((?:client_secret|[?&]sig)=)[^&|'\s]*", r"\1***", masked)  # of Azure


COMMON_OPTIONS: Options = {"limit": ("limit", parse_bytes), "key_file": ("key_file", file_path)}
