"""The process that parses documents: takes one file at a time and answers with plain data.

It imports no model library, so that it starts quickly and has little to lose. Its parent limits its
time and its output. It limits its own memory before it reads the first file.

Both sides send frames: JSON and bytes, each preceded by its length. The receiver only parses plain
data and executes none of it. A hostile document, or a parser that it has taken over, can thus
affect only its own text.
"""

from __future__ import annotations

import importlib
import json
import os
import queue
import struct
import threading
from collections.abc import Mapping
from typing import IO, Any

from kvrag.chunk import Document, Mark
from kvrag.errors import DocumentError
from kvrag.ingest.files import encoded, is_storable, printable
from kvrag.ingest.filters import plain_metadata
from kvrag.ingest.headings import checked_outline
from kvrag.ingest.limits import MAX_DOCUMENTS, MAX_METADATA_CHARACTERS
from kvrag.ingest.loaders import Loader, NoTextError, load_bytes
from kvrag.plugins import told
from kvrag.process import limit_memory

_MAX_FILE_BYTES = 1 << 62
_LENGTHS = struct.Struct("<IQ")
# Room for a document's metadata with every character escaped, and for a reason.
_MAX_HEAD_BYTES = 6 * MAX_METADATA_CHARACTERS + (1 << 20)

OUT_OF_MEMORY = 86
"""Exit code. The remaining memory may be fragmented: the next file gets a new process."""


def main() -> None:
    """Answer the parent until it closes the pipe or exits."""
    requests, answers = _take_pipes()
    received: queue.Queue[tuple[dict[str, Any], bytes]] = queue.Queue(1)
    threading.Thread(
        target=_receive, args=(requests, received), name="kvrag-receive", daemon=True
    ).start()
    settings, _ = received.get()
    try:
        others = {suffix: _import(name) for suffix, name in settings["loaders"].items()}
    except BaseException as error:  # SystemExit too
        _send(answers, {"end": "failed", "reason": told(error)})
        return
    limit_memory(settings["memory_bytes"])
    _send(answers, {"end": "ready"})
    while True:
        head, content = received.get()
        _send(answers, _answer(answers, head["path"], content, others, settings["max_characters"]))


def _take_pipes() -> tuple[IO[bytes], IO[bytes]]:
    """Return the parent's pipes; a loader's own output and input then go nowhere."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    # A process that a loader forks and that returns would answer the next file too.
    os.register_at_fork(after_in_child=lambda: _let_go(requests, answers))
    return requests, answers


def _let_go(*streams: IO[bytes]) -> None:
    """Keep the parent's pipes out of a process that a loader has forked: writing to them fails."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    for stream in streams:
        os.dup2(nothing, stream.fileno(), inheritable=False)
    os.close(nothing)


def _receive(requests: IO[bytes], received: queue.Queue[tuple[dict[str, Any], bytes]]) -> None:
    try:
        while (frame := read_frame(requests, _MAX_FILE_BYTES)) is not None:
            received.put(frame)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    # Even in the middle of a file: the parent is gone, or wants no answer any more.
    os._exit(0)


def _answer(
    answers: IO[bytes], path: str, content: bytes, others: Mapping[str, Loader], room: int
) -> dict[str, Any]:
    """Send the documents of a file, and return its result."""
    try:
        for number, document in enumerate(load_bytes(path, content, others)):
            room -= len(document.text)
            if room < 0:
                raise DocumentError(
                    f"{path}: gives more text than the limit for a file's size; split it, or "
                    "raise the limit (--max-file-size, or ParseLimits.max_file_bytes)"
                )
            if number >= MAX_DOCUMENTS:
                raise DocumentError(f"{path}: holds more than {MAX_DOCUMENTS:,} rows; split it")
            part, metadata, outline = _checked(path, document)
            text = encoded(document.source, document.text)
            _send(answers, {"part": part, "metadata": metadata, "outline": outline}, text)
    except NoTextError as error:
        return {"end": "no text", "reason": str(error)}
    except DocumentError as error:
        return {"end": "refused", "reason": str(error)}
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except BaseException as error:  # SystemExit too: it would end the process without an answer
        return {"end": "refused", "reason": f"{path}: its loader failed ({told(error)})"}
    return {"end": "done"}


def _checked(path: str, document: Document) -> tuple[str, dict[str, Any], tuple[Mark, ...]]:
    """Return the part of a document's source after the path, its metadata and its outline."""
    if not is_storable(document.source):
        raise DocumentError(
            f"{printable(document.source)}: the source that its loader gave is not valid Unicode"
        )
    try:
        metadata = plain_metadata(document.metadata)
        outline = checked_outline(document.outline, document.text)
    except DocumentError as error:
        raise DocumentError(f"{document.source}: {error}") from error
    return document.source.removeprefix(path), metadata, outline


def _send(answers: IO[bytes], head: dict[str, Any], body: bytes = b"") -> None:
    pieces = pack_frame(head, body)
    try:
        for piece in pieces:
            answers.write(piece)
        answers.flush()
    except BaseException:  # half a frame is sent: the parent would read the next as its rest
        os._exit(1)


def _import(name: str) -> Loader:
    module, _, function = name.partition(":")
    loader: Loader = getattr(importlib.import_module(module), function)
    return loader


def pack_frame(head: dict[str, Any], body: bytes = b"") -> tuple[bytes, bytes]:
    """Return a frame as two pieces, to be written one after the other."""
    content = json.dumps(head).encode()
    return _LENGTHS.pack(len(content), len(body)) + content, body


def read_frame(stream: IO[bytes], max_body_bytes: int) -> tuple[dict[str, Any], bytes] | None:
    """Return the next frame, or None when the stream ends, even within a frame.

    Raises
    ------
    ValueError
        When the frame is too long or malformed.
    """
    lengths = stream.read(_LENGTHS.size)
    if len(lengths) < _LENGTHS.size:
        return None
    head_bytes, body_bytes = _LENGTHS.unpack(lengths)
    if head_bytes > _MAX_HEAD_BYTES or body_bytes > max_body_bytes:
        raise ValueError("its parser's answer is longer than allowed")
    content, body = stream.read(head_bytes), stream.read(body_bytes)
    if len(content) < head_bytes or len(body) < body_bytes:
        return None
    try:
        head = json.loads(content)
    except RecursionError as error:
        raise ValueError("its parser's answer is nested too deeply") from error
    if not isinstance(head, dict):
        raise ValueError("its parser's answer cannot be read")
    return head, body
