"""Loaders that do to the process that parses what hostile files might."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator

from kvrag.chunk import Document


def hang(path: str, content: bytes) -> Iterator[Document]:
    time.sleep(3600)
    yield Document(path, "late")


def crash(path: str, content: bytes) -> Iterator[Document]:
    os.kill(os.getpid(), signal.SIGSEGV)
    yield Document(path, "never")


def leave(path: str, content: bytes) -> Iterator[Document]:
    os._exit(7)
    yield Document(path, "never")


def eat(path: str, content: bytes) -> Iterator[Document]:
    held = [bytearray(1 << 20) for _ in range(1 << 20)]
    yield Document(path, str(len(held)))


def flood(path: str, content: bytes) -> Iterator[Document]:
    for number in range(1 << 30):
        yield Document(f"{path}#{number}", "x" * 1000)


def recurse(path: str, content: bytes) -> Iterator[Document]:
    yield from recurse(path, content)


def babble(path: str, content: bytes) -> Iterator[Document]:
    """What is printed must not be taken for an answer."""
    print("a" * 10_000)
    os.write(1, b"b" * 10_000)
    yield Document(path, sys.stdin.read() + "said nothing")


def steal(path: str, content: bytes) -> Iterator[Document]:
    yield Document("/etc/passwd", "of another file")


def repeat(path: str, content: bytes) -> Iterator[Document]:
    yield Document(path, "one")
    yield Document(path, "two")


def halve(path: str, content: bytes) -> Iterator[Document]:
    yield Document(path, "half \ud800")


def mistype(path: str, content: bytes) -> Iterator[Document]:
    yield Document(path, "text", {"set": {1}})


def garble(path: str, content: bytes) -> Iterator[Document]:
    """Write what a process would that a hostile file has taken over."""
    for descriptor in range(3, 64):
        try:
            os.write(descriptor, b"\xff" * 64)
        except OSError:
            continue
    yield Document(path, "after garbage")


def modules(path: str, content: bytes) -> Iterator[Document]:
    yield Document(path, " ".join(sys.modules))


def shout(path: str, content: bytes) -> Iterator[Document]:
    yield Document(path, content.decode().upper(), {"loud": True})
