"""The settings of an index, recorded once in ``index.json``, and the lock of its one writer."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrag.arguments import shown
from kvrag.chunk import Chunk, ChunkKey, chunk_key
from kvrag.codec.names import COMPRESSION_GONE, expected_bytes_per_token
from kvrag.errors import IndexFormatError, IndexLockedError, IndexNotFoundError, StoreError
from kvrag.ingest.contexts import DEFAULT_TOKENS, FILLER, INDEX, TRUST, Context
from kvrag.models.control import CONTROL_TOKENS, KEEP
from kvrag.regularfile import checksum, other_kind, read_regular, replace_file
from kvrag.store.file import store_errors, sync_folder

if TYPE_CHECKING:
    from kvrag.kvcache import KVSpec


FORMAT_VERSION = 5
FILE_NAME = "index.json"
VECTORS_NAME = "vectors.cache"
WORDS_NAME = "words.cache"
RUNS_NAME = "runs.cache"
KV_FOLDER = "kv"
VIEW_OF_NAME = "view-of.txt"
"""Holds the URL of the shared index that a folder is a view of."""
NO_COMPRESSION = "none"
TEXT = "text"
"""`IndexConfig.compression` of models that compute prompts as wholes (`kvrag.fusion.whole`)."""
_KIND = "kvrag index"
# Defined here so that listing an index needs no tensor library.
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""The supported element types of KV, with their sizes in bytes."""

# Values for fields that the first files of this version lack.
_DEFAULTS = {
    "index_id": "",
    "control_tokens": KEEP,
    "trust": INDEX,
    "writer": "",
}
# Which words a field may hold.
_CHOICES: dict[str, Collection[str]] = {
    "context": DEFAULT_TOKENS,
    "control_tokens": CONTROL_TOKENS,
    "dtype": DTYPE_BYTES,
    "trust": TRUST,
}
# Fields that hold hexadecimal digits.
_DIGITS = {
    "profile": "([0-9a-f]{40})?",
    "writer": "([0-9a-f]{40})?",
    "key_check": "([0-9a-f]{32})?",
    "index_id": "([0-9a-f]{32})?",
    "tenant_salt": "([0-9a-f]{2}){1,64}",
}


@dataclass(frozen=True)
class IndexConfig:
    """The settings of an index; only codec and profile change after its creation.

    Attributes
    ----------
    model
        Where to find the model: a folder, a hub name, or "" for an object built in memory.
    model_fingerprint, tokenizer_fingerprint
        Digest of the weights with the config, and digest of the tokenizer.
    num_layers, num_kv_heads, head_dim, dtype
        Shape and element type of the model's KV.
    max_positions
        The model's context window in tokens.
    prefix_ids
        Token ids that precede every chunk when it is encoded: the head of the index's prompts.
    embedding, embedding_dim
        Name and number of dimensions of the embedding.
    codec
        Name of the codec of new records; each record names the codec it was written with.
    profile
        Hash of the codec's profile, or "" if it has none, or none yet.
    chunk_tokens
        The largest number of tokens in a chunk.
    context, context_tokens
        What precedes chunks when they are encoded (`kvrag.ingest.contexts`), and the largest
        number of its tokens; 0 if no number limits it.
    compression
        `TEXT` if chunks have no KV, since the model computes prompts as wholes; or ``none``.
    tenant_salt
        The salt that keys the chunk keys, in hexadecimal.
    store
        URL of the store of KV, without a password; "" for the index's own folder.
    control_tokens
        What happens to the model's control strings in documents (`kvrag.models.control`).
    trust
        Whose chunks context ``similar`` takes: those of the same folder, or of the index.
    writer
        Fingerprint of the writer (`kvrag.ingest.profiles`), or "" without one.
    key_check
        Hexadecimal check value that identifies the index's key; "" if nothing is encrypted.
    index_id
        32 random hexadecimal digits that the seals of the catalog include; "" for indexes that
        are older than these digits.
    """

    model: str
    model_fingerprint: str
    tokenizer_fingerprint: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    max_positions: int
    prefix_ids: tuple[int, ...]
    embedding: str
    embedding_dim: int
    codec: str
    profile: str
    chunk_tokens: int
    context: str
    context_tokens: int
    compression: str
    tenant_salt: str
    store: str = ""
    control_tokens: str = KEEP
    trust: str = INDEX
    writer: str = ""
    key_check: str = ""
    index_id: str = ""

    @property
    def spec(self) -> KVSpec:
        """Shape and type of the model's KV."""
        from kvrag.kvcache import DTYPES, KVSpec

        return KVSpec(self.num_layers, self.num_kv_heads, self.head_dim, DTYPES[self.dtype])

    @property
    def chunk_context(self) -> Context:
        """What precedes chunks when they are encoded."""
        return Context(self.context, self.context_tokens)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in all layers, uncompressed; 0 if none is stored."""
        if not self.has_kv:
            return 0
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def expected_bytes_per_token(self) -> int:
        """Approximate size of a token's KV in the store, in bytes."""
        size = DTYPE_BYTES[self.dtype]
        return expected_bytes_per_token(self.codec, self.bytes_per_token, size)

    @property
    def has_kv(self) -> bool:
        """Whether chunks have KV; otherwise only their text and vectors are stored."""
        return self.compression != TEXT

    def key_of(self, chunk: Chunk) -> ChunkKey:
        """Return the name of a chunk's KV, the first of those in `Chunk.encodings`."""
        options = {} if self.has_kv else {"compression": TEXT}
        if self.writes(chunk.contexts[0]):
            options["writer"] = self.writer
        return chunk_key(
            tenant_salt=bytes.fromhex(self.tenant_salt),
            model_fingerprint=self.model_fingerprint,
            tokenizer_fingerprint=self.tokenizer_fingerprint,
            prefix_ids=self.prefix_ids,
            token_ids=chunk.token_ids,
            context_ids=chunk.contexts[0],
            options=options,
        )

    def writes(self, context_ids: tuple[int, ...]) -> bool:
        """Return whether the writer acts on a chunk that is encoded after `context_ids`."""
        return bool(self.writer and context_ids)

    def save(self, folder: Path) -> None:
        """Write ``index.json`` atomically. Raises StoreError when the write fails."""
        write_atomically(folder / FILE_NAME, self.to_bytes())

    def to_bytes(self) -> bytes:
        """Return the content of ``index.json``."""
        # kvrag 0.2 reads no file without "anchors".
        values = {"kind": _KIND, **asdict(self), "anchors": "", "format_version": FORMAT_VERSION}
        values["checksum"] = checksum(values)
        return json.dumps(values, indent=2).encode() + b"\n"

    @classmethod
    def load(cls, folder: Path) -> IndexConfig:
        """Read and check ``index.json``.

        Raises
        ------
        IndexNotFoundError
            When there is no such file.
        IndexFormatError
            When this version of kvrag cannot read it, or it differs from what was written.
        """
        path = folder / FILE_NAME
        with store_errors("read", path):
            try:
                raw = read_regular(path)
            except (FileNotFoundError, NotADirectoryError) as error:
                raise IndexNotFoundError(
                    f"there is no index in {folder} (no {FILE_NAME}); make one with "
                    f"'kvrag ingest PATH... --index {folder} --model MODEL' or Index.create"
                ) from error
        return cls.from_bytes(raw, path)

    @classmethod
    def from_bytes(cls, raw: bytes, path: Path) -> IndexConfig:
        """Check the content of an ``index.json`` from `path`. Raises IndexFormatError."""
        try:
            values = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise _foreign(path, f"it is not JSON ({error})") from error
        config = cls(**_checked(path, values))
        _compare(path, values)
        return config


def write_atomically(path: Path, *parts: bytes) -> None:
    """Write a file so that readers see the old content or the new, never a part.

    Raises
    ------
    StoreError
        When the write fails; the old file is then unchanged.
    """
    with store_errors("write", path):
        replace_file(path, *parts)
        sync_folder(path.parent)


def no_kv(place: object, why: str = "") -> str:
    """Return why what needs KV refuses an index of `TEXT`; `why` is the model's reason."""
    because = f" ({why})" if why else ""
    return (
        f"{place} stores no KV, because its model computes each prompt as a whole{because}. Take "
        "an index of another model"
    )


def newer_error(path: Path | str, expected: str, found: int) -> IndexFormatError:
    """Return the error of a file that a later version of kvrag wrote."""
    return IndexFormatError(
        f"{path} was written by a newer kvrag: expected {expected}, found {found}. Upgrade kvrag "
        "(pip install --upgrade kvrag); the index is as it was"
    )


def _foreign(path: Path, what: str) -> IndexFormatError:
    return IndexFormatError(
        f"{path} does not describe an index that this version of kvrag can read: {what}; "
        "expected a file written by Index.create. Use another folder, or ingest again into a "
        "new one"
    )


def _compare(path: Path, values: Mapping[str, Any]) -> None:
    """Raise IndexFormatError unless a file's content matches its checksum."""
    found = values.get("checksum")
    expected = checksum(values)
    if found != expected:
        raise IndexFormatError(
            f"{path} was altered or damaged after it was written: its checksum is {shown(found)}, "
            "its "
            f"content gives {expected!r}. Put back the file as it was, from a copy; without one, "
            "ingest into a new folder"
        )


def _checked(path: Path, values: Any) -> dict[str, Any]:
    if not isinstance(values, dict) or values.get("kind") != _KIND:
        raise _foreign(path, f"its 'kind' is not {_KIND!r}")
    version = values.get("format_version")
    if type(version) is int and version > FORMAT_VERSION:
        raise newer_error(path, f"at most format version {FORMAT_VERSION}", version)
    if type(version) is not int or version != FORMAT_VERSION:
        raise _foreign(path, f"format version {FORMAT_VERSION} expected, found {shown(version)}")
    values = {**_DEFAULTS, **values}
    if values.get("context") == "corpus":  # of kvrag 0.2, with passages of its documents
        values["context"] = FILLER
    checked: dict[str, Any] = {}
    for field in fields(IndexConfig):
        name, value = field.name, values.get(field.name)
        if name == "prefix_ids":
            is_valid = isinstance(value, list) and all(type(item) is int for item in value)
        elif field.type == "int":
            is_valid = type(value) is int and value >= (0 if name == "context_tokens" else 1)
        else:
            is_valid = isinstance(value, str) and value in _CHOICES.get(name, [value])
            is_valid = is_valid and bool(re.fullmatch(_DIGITS.get(name, "(?s:.*)"), value))
        if not is_valid:
            raise _foreign(path, f"{name!r} is {shown(value)}")
        checked[name] = tuple(value) if name == "prefix_ids" else value
    if checked["compression"] not in (NO_COMPRESSION, TEXT):
        raise IndexFormatError(
            f"{path}: chunks are stored as {shown(checked['compression'])}. {COMPRESSION_GONE}; "
            "ingest the documents into a new index"
        )
    return checked


LOCK_NAME = "writer.lock"


@contextlib.contextmanager
def writer_lock(folder: Path) -> Iterator[None]:
    """Hold the right to write to the index in `folder`.

    The kernel releases the lock when the process ends, for whatever reason; the file stays.

    Raises
    ------
    IndexLockedError
        Immediately, when another process or thread holds the lock; names the process.
    StoreError
        When the folder cannot be written.
    """
    path = folder / LOCK_NAME
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    except OSError as error:
        raise StoreError(
            f"cannot write to the index in {folder}: {error.strerror or error}; change the "
            "folder's permissions, or make the index elsewhere"
        ) from error
    try:
        if kind := other_kind(os.fstat(descriptor).st_mode):
            raise StoreError(f"cannot lock {path}: it is not a regular file but {kind}; remove it")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise StoreError(f"cannot lock {path}: {error.strerror or error}") from error
            holder = os.read(descriptor, 32).decode("ascii", "replace").strip()
            raise IndexLockedError(
                f"the index in {folder} is being written to by process {holder or 'unknown'}; "
                "wait until it has finished, or end it (nothing done so far is lost)"
            ) from error
        with contextlib.suppress(OSError):  # a full disk must not stop gc, which makes room
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)
