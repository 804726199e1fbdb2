"""The process that parses documents: takes a file at a time, answers with plain data.

It imports no model library, so that it starts quickly and has little to lose. Its parent limits
its time and what it answers; its memory it limits itself, before it sees the first file.
"""

from __future__ import annotations

import importlib
import os
import queue
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from kvrag.errors import DocumentError
from kvrag.ingest.frames import pack_frame, read_frame
from kvrag.ingest.limits import MAX_DOCUMENTS
from kvrag.ingest.loaders import Loader, NoTextError, load_bytes

# What an interpreter takes of its address space where the system does not tell.
_DEFAULT_BASE_BYTES = 512 << 20
_MAX_FILE_BYTES = 1 << 62

OUT_OF_MEMORY = 86
"""Exit code. What is left of the memory may be in pieces: the next file gets a new process."""


def main() -> None:
    """Answer the parent until it closes the pipe or is gone."""
    requests, answers = _take_pipes()
    received: queue.Queue[tuple[dict[str, Any], bytes]] = queue.Queue(1)
    threading.Thread(
        target=_receive, args=(requests, received), name="kvrag-receive", daemon=True
    ).start()
    settings, _ = received.get()
    try:
        others = {suffix: _import(name) for suffix, name in settings["loaders"].items()}
    except Exception as error:
        _send(answers, {"end": "failed", "reason": f"{type(error).__name__}: {error}"})
        return
    _limit_memory(settings["memory_bytes"])
    _send(answers, {"end": "ready"})
    while True:
        head, content = received.get()
        _send(answers, _answer(answers, head["path"], content, others, settings["max_characters"]))


def _take_pipes() -> tuple[IO[bytes], IO[bytes]]:
    """Return the pipes of the parent; what a loader prints or asks for then goes nowhere."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    return requests, answers


def _receive(requests: IO[bytes], received: queue.Queue[tuple[dict[str, Any], bytes]]) -> None:
    try:
        while (frame := read_frame(requests, _MAX_FILE_BYTES)) is not None:
            received.put(frame)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    # Also in the middle of a file: the parent is gone, or wants no answer any more.
    os._exit(0)


def _answer(
    answers: IO[bytes], path: str, content: bytes, others: Mapping[str, Loader], room: int
) -> dict[str, Any]:
    """Send the documents of a file, and return how it ended."""
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
            try:
                text = document.text.encode()
            except UnicodeEncodeError as error:
                raise DocumentError(
                    f"{document.source}: the text holds half a surrogate pair at character "
                    f"{error.start}; decode it correctly before it is added"
                ) from error
            part = document.source.removeprefix(path)
            _send(answers, {"part": part, "metadata": document.metadata}, text)
    except NoTextError as error:
        return {"end": "no text", "reason": str(error)}
    except DocumentError as error:
        return {"end": "refused", "reason": str(error)}
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except Exception as error:
        reason = f"{path}: its loader failed ({type(error).__name__}: {str(error)[:1000]})"
        return {"end": "refused", "reason": reason}
    return {"end": "done"}


def _send(answers: IO[bytes], head: dict[str, Any], body: bytes = b"") -> None:
    pieces = pack_frame(head, body)
    try:
        for piece in pieces:
            answers.write(piece)
        answers.flush()
    except BaseException:  # half a frame is out: whatever followed would be taken for the rest
        os._exit(1)


def _import(name: str) -> Loader:
    module, _, function = name.partition(":")
    loader: Loader = getattr(importlib.import_module(module), function)
    return loader


def _limit_memory(memory_bytes: int) -> None:
    """Let this process have so much more memory than it has now, where the system allows it."""
    if sys.platform == "win32":
        return
    import resource

    try:
        base = int(Path("/proc/self/statm").read_bytes().split()[0]) * resource.getpagesize()
    except (OSError, ValueError):
        base = _DEFAULT_BASE_BYTES
    try:
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        wanted = base + memory_bytes
        if most != resource.RLIM_INFINITY:
            wanted = min(wanted, most)
        resource.setrlimit(resource.RLIMIT_AS, (wanted, wanted))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    except (OSError, ValueError):
        pass  # the system keeps no such limit
