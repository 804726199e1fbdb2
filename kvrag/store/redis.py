"""Records in Redis: shared by machines, gone when Redis forgets them.

A record is split at the ends of its blocks, so that each value holds one layer or a few layers. One
value, ``PREFIX:{KEY}``, holds the list of the others and the record's head. Opening a record is one
round trip, and reading a range is one. Pieces are written first, with a time to live; the script
that writes the list makes them lasting. Redis removes whatever a killed writer leaves, and a reader
sees all of a record or nothing. Pieces of a deleted record live on for `GRACE_SECONDS`, for readers
that have it open.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import struct
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, ClassVar
from urllib.parse import unquote, urlsplit

from kvrag.arguments import shown
from kvrag.chunk import ChunkKey
from kvrag.errors import KVRagError, ParameterError, RecordError, StoreError, StoreUnreachableError
from kvrag.plugins import require
from kvrag.recordformat import piece_ends
from kvrag.store.base import counted
from kvrag.store.metrics import StoreMetrics
from kvrag.store.remote import HeadedRecord, Options, RemoteStore, seconds

PASSWORD_VARIABLE = "KVRAG_REDIS_PASSWORD"
_LOG_IN = f"set {PASSWORD_VARIABLE}, or put USER:PASSWORD@ before the host"
DEFAULT_PREFIX = "kvrag"
DEFAULT_TIMEOUT_SECONDS = 2.0
GRACE_SECONDS = 60

# Time to live of pieces until their list is written: longer than any upload takes.
_UPLOAD_SECONDS = 3600
_MAX_CONNECTIONS = 64
_PAGE = 1000
_MOST_WAITING_BYTES = 16 << 20

_LEAST_PIECE_BYTES = 64 << 10
# A piece must pass within the timeout, on slow lines too.
_MOST_PIECE_BYTES = 1 << 20
# Bytes read with the list: a record's header, or all of a small record.
_MOST_HEAD_BYTES = 64 << 10
_LEAST_HEAD_BYTES = 4096

_MAGIC = b"kvr1"
# magic, generation, record bytes, number of pieces (the head is the first)
_LIST = struct.Struct("<4s16sQI")
_END = struct.Struct("<Q")

# At most 65,536 pieces are accepted: a foreign value must not keep Redis busy.
_FORGET = """
local function forget(list, seconds)
  if string.sub(list, 1, 4) ~= 'kvr1' or #list < 32 then return end
  local count = math.min(struct.unpack('<I4', list, 29), 65536)
  for i = 1, count - 1 do
    redis.call('EXPIRE', KEYS[1] .. ':' .. string.sub(list, 5, 20) .. ':' .. i, seconds)
  end
end
local old = redis.call('GETRANGE', KEYS[1], 0, 31)
"""
# KEYS: list, then its pieces. ARGV: grace in seconds, list.
# The same list again means that the call is repeated: its answer was lost on the way.
_COMMIT = f"""{_FORGET}
if old == string.sub(ARGV[2], 1, 32) then return 1 end
for i = 2, #KEYS do
  if redis.call('PERSIST', KEYS[i]) == 0 then return -1 end
end
redis.call('SET', KEYS[1], ARGV[2])
forget(old, ARGV[1])
return 1
"""
# KEYS: list. ARGV: grace in seconds.
_DELETE = f"""{_FORGET}
forget(old, ARGV[1])
return redis.call('DEL', KEYS[1])
"""
# What Redis says, and what to do.
_REMEDIES = (
    (("NOAUTH", "WRONGPASS"), f"Redis asks for a password: {_LOG_IN}"),
    (("OOM", "maxmemory"), "its memory is full: raise its maxmemory, or set limit= of this tier"),
    (("READONLY",), "it is a replica: give the URL of the primary"),
    (("DB index",), "give the number of a database that it has"),
    (
        ("MOVED ", "ASK ", "CROSSSLOT", "CLUSTERDOWN"),
        "it is a node of a cluster: give the URL of a proxy that speaks for all",
    ),
    (("",), "see the log of Redis"),
)


class RedisRecord(HeadedRecord):
    """An opened record of a `RedisStore`; its head came with the list of its pieces."""

    def __init__(self, store: RedisStore, key: ChunkKey, content: bytes) -> None:
        try:
            magic, generation, size_bytes, num_pieces = _LIST.unpack_from(content)
            first = _LIST.size + num_pieces * _END.size
            ends = [end for (end,) in _END.iter_unpack(content[_LIST.size : first])]
            is_list = magic == _MAGIC and generation.isalnum() and ends == sorted(ends)
            is_whole = (ends[0], ends[-1]) == (len(content) - first, size_bytes)
        except (struct.error, IndexError):
            is_list = is_whole = False
        if not (is_list and is_whole):
            raise RecordError(
                f"record {key} in {store.url}: expected a list of pieces that this version of "
                "kvrag wrote, found another value, or a part of one; delete it and ingest again"
            )
        super().__init__(key, size_bytes, content[first:], store.metrics)
        self._store = store
        self._name = f"{store.name_of(key)}:{generation.decode()}"
        self._ends = ends

    def _fetch(self, first: int, buffer: memoryview) -> None:
        """Fill a buffer from the pieces after the head, in one round trip."""
        wanted, place, stop = [], first, first + buffer.nbytes
        for number, (begin, end) in enumerate(pairwise(self._ends), 1):
            if place < min(end, stop):
                wanted.append((number, place - begin, min(end, stop) - begin))
                place = min(end, stop)
        answers = self._store.read(
            [("GETRANGE", f"{self._name}:{number}", at, to - 1) for number, at, to in wanted]
        )
        filled = 0
        for (number, at, to), content in zip(wanted, answers, strict=True):
            if len(content) != to - at:
                raise StoreError(
                    f"record {self._key} in {self._store.url}: expected {to - at} bytes of "
                    f"piece {number}, found {len(content)}; Redis has removed it: give it more "
                    "memory, or 'kvrag verify --repair'"
                )
            buffer[filled : filled + len(content)] = content
            filled += len(content)


class RedisStore(RemoteStore):
    """Records in Redis 6 or newer.

    Parameters
    ----------
    url
        ``redis://[USER[:PASSWORD]@]HOST[:PORT][/DB]``, ``rediss://`` for TLS, or
        ``unix://PATH``. Without a password in it, that in the environment's
        ``KVRAG_REDIS_PASSWORD`` is used.
    prefix
        Prefix of all names in Redis; the store does not see other prefixes' records.
    timeout_seconds
        How long connecting, or an answer, may take before Redis counts as unreachable.
    must_answer
        Raise if Redis is unreachable now; otherwise it may become reachable later.

    Raises
    ------
    ParameterError
        When the URL is invalid, or the library ``redis`` is not installed.
    StoreUnreachableError
        When Redis does not answer.
    StoreError
        When Redis refuses: a wrong password, a database that it does not have.
    """

    options: ClassVar[Options] = {
        "prefix": ("prefix", str),
        "timeout": ("timeout_seconds", seconds),
    }

    def __init__(
        self,
        url: str,
        *,
        prefix: str = DEFAULT_PREFIX,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        must_answer: bool = True,
    ) -> None:
        self._redis = require("redis", "redis")
        backoff = require("redis.backoff", "redis")
        retry = require("redis.retry", "redis")
        options: dict[str, Any] = {
            "socket_timeout": timeout_seconds,
            "socket_connect_timeout": timeout_seconds,
            # Retry once: a pooled connection may lead to a server that has been restarted since.
            "retry": retry.Retry(backoff.NoBackoff(), 1),
            "max_connections": _MAX_CONNECTIONS,
            "timeout": None,
        }
        try:
            parts = urlsplit(url)
            database = parts.path.strip("/")
            if parts.scheme != "unix" and database and not database.isdecimal():
                # The library would take the first one instead.
                raise ValueError(f"{shown(database)} is no number of a database")
            if not parts.password and PASSWORD_VARIABLE in os.environ:
                options["password"] = os.environ[PASSWORD_VARIABLE]
            pool = self._redis.BlockingConnectionPool.from_url(url, **options)
        except ValueError as error:
            # What is taken for a port may be a part of the password.
            why = "characters as / @ # ? % of a password are written %2F %40 %23 %3F %25"
            raise ParameterError(
                f"not a URL of Redis: {why if '@' in url else error}; expected redis://HOST:PORT/DB"
            ) from error
        self.url = _without_password(url)
        self._client = self._redis.Redis(connection_pool=pool)
        self._prefix = prefix
        self._commit = self._client.register_script(_COMMIT)
        self._delete = self._client.register_script(_DELETE)
        self.metrics = StoreMetrics("redis")
        try:
            with self._errors("open"):
                self._client.ping()
        except StoreUnreachableError:
            if must_answer:
                raise

    def name_of(self, key: ChunkKey) -> str:
        """Return the name under which the list of a record's pieces is kept."""
        # In braces, so that a cluster keeps the pieces with the list, as the scripts require.
        return f"{self._prefix}:{{{key}}}"

    def replace(self, key: ChunkKey, record: bytes) -> None:
        """Write a record in place of the existing one; readers of that one can finish reading.

        Durable as far as Redis is (``appendonly``). Raises StoreError when Redis refuses.
        """
        name = self.name_of(key)
        generation = secrets.token_hex(8)
        ends = _split_record(record)
        pieces = [f"{name}:{generation}:{number}" for number in range(1, len(ends))]
        head = _LIST.pack(_MAGIC, generation.encode(), len(record), len(ends))
        content = b"".join([head, *map(_END.pack, ends), record[: ends[0]]])
        view = memoryview(record)
        with self._errors("write"):
            pipeline = self._client.pipeline(transaction=False)
            waiting = 0
            for piece, (begin, end) in zip(pieces, pairwise(ends), strict=True):
                pipeline.set(piece, view[begin:end], ex=_UPLOAD_SECONDS)
                waiting += end - begin
                if waiting >= _MOST_WAITING_BYTES or end == len(record):
                    pipeline.execute()
                    waiting = 0
            done = self._commit(keys=[name, *pieces], args=[GRACE_SECONDS, content])
        if done == -1:
            raise StoreError(
                f"cannot write to {self.url}: Redis removed a part of record {key} at once; raise "
                "its maxmemory, or store smaller records (a codec)"
            )
        self.metrics.wrote(len(record))

    @counted
    def open(self, key: ChunkKey) -> RedisRecord | None:
        """Open a record for reading, or return None if there is none.

        Raises
        ------
        StoreError
            When Redis does not deliver the record.
        RecordError
            When another kind of value is kept under its name.
        """
        (content,) = self.read([("GET", self.name_of(key))])
        return None if content is None else RedisRecord(self, key, content)

    def contains(self, key: ChunkKey) -> bool:
        """Say whether there is a record of `key`."""
        return bool(self.read([("EXISTS", self.name_of(key))])[0])

    def delete(self, key: ChunkKey) -> bool:
        """Remove a record and return whether there was one. Its readers can finish reading."""
        with self._errors("delete from"):
            return bool(self._delete(keys=[self.name_of(key)], args=[GRACE_SECONDS]))

    def sizes(self) -> Iterator[tuple[ChunkKey, int]]:
        """Iterate over keys and the bytes of their records, in no particular order."""
        seen: set[ChunkKey] = set()
        cursor = 0
        glob = re.sub(r"([*?\[\]\\])", r"\\\1", self._prefix) + ":{*}"
        while True:
            ((cursor, names),) = self.read([("SCAN", cursor, "MATCH", glob, "COUNT", _PAGE)])
            found = {key: name for name in names if (key := self._key_of(name)) is not None}
            # A name may come up twice, and its record may have been deleted meanwhile.
            new = [key for key in found if key not in seen]
            seen.update(new)
            heads = self.read([("GETRANGE", found[key], 0, _LIST.size - 1) for key in new])
            for key, head in zip(new, heads, strict=True):
                if len(head) == _LIST.size and head.startswith(_MAGIC):
                    yield key, _LIST.unpack(head)[2]
            if not int(cursor):
                return

    def close(self) -> None:
        """Close the connections."""
        self._client.close()
        self._client.connection_pool.disconnect()

    def read(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Run read commands in one round trip. Raises StoreError."""
        if not commands:
            return []
        with self._errors("read"):
            pipeline = self._client.pipeline(transaction=False)
            for name, *arguments in commands:
                # As an option, so that redis-py leaves the answer as it is.
                pipeline.execute_command(name, *arguments)
            return list(pipeline.execute())

    # -- private -----------------------------------------------------------------------------

    def _key_of(self, name: bytes) -> ChunkKey | None:
        digest = name.decode(errors="replace").removeprefix(f"{self._prefix}:{{").removesuffix("}")
        try:
            key = ChunkKey(digest)
        except ValueError:
            return None
        return key if self.name_of(key).encode() == name else None

    @contextlib.contextmanager
    def _errors(self, action: str) -> Iterator[None]:
        errors = self._redis.exceptions
        where = f"cannot {action} {self.url}"
        try:
            yield
        except (errors.AuthenticationError, errors.NoPermissionError) as error:
            why = f"Redis refuses the password or the user ({error})"
            raise StoreError(f"{where}: {why}; {_LOG_IN}") from error
        except (errors.ConnectionError, errors.TimeoutError, OSError) as error:
            raise StoreUnreachableError(
                f"{where}: Redis does not answer ({error}); start it, or check the host and the "
                "port"
            ) from error
        except errors.RedisError as error:
            text = str(error)
            if "WRONGTYPE" in text:
                raise RecordError(
                    f"{self.url}: another program keeps something under a name that begins with "
                    f"{shown(self._prefix)} ({text}); choose another prefix"
                ) from error
            remedy = next(
                remedy for marks, remedy in _REMEDIES if any(mark in text for mark in marks)
            )
            raise StoreError(f"{where}: {text}; {remedy}") from error
        except KVRagError:
            raise
        except (ValueError, TypeError, LookupError, MemoryError) as error:
            # The client's parser passes on whatever it makes of a damaged reply.
            raise StoreError(
                f"{where}: what came is no reply of Redis ({type(error).__name__}: {error}); look "
                "at what lies between"
            ) from error


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    user, _, place = parts.netloc.rpartition("@")
    name = unquote(user.partition(":")[0])
    return parts._replace(netloc=f"{name}@{place}" if name else place).geturl()


def _split_record(record: bytes) -> list[int]:
    """Return the offsets at which a record's head and pieces end."""
    if len(record) <= _LEAST_HEAD_BYTES:
        return [len(record)]
    ends = piece_ends(record) or (0, len(record))
    # The head includes what is read of a header before its length is known.
    chosen = [min(max(ends[0], _LEAST_HEAD_BYTES), _MOST_HEAD_BYTES)]
    for end in ends[1:]:
        # Neighbouring blocks share a piece until it is large enough for a separate name.
        while end - chosen[-1] > _MOST_PIECE_BYTES:
            chosen.append(chosen[-1] + _MOST_PIECE_BYTES)
        if end - chosen[-1] >= _LEAST_PIECE_BYTES or end == len(record):
            chosen.append(end)
    return chosen
