"""Loaders that do to the process that parses what hostile files might."""

import contextlib
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvrag.chunk import Document


def hang(path: str, content: bytes) -> Iterator[Document]:
    time.sleep(3600)
    yield Document(path, "late")


def crash(path: str, content: bytes) -> Iterator[Document]:
    os.kill(os.getpid(), signal.SIGSEGV)
    yield Document(path, "never")


def eat(path: str, content: bytes) -> Iterator[Document]:
    held = [bytearray(1 << 20) for _ in range(1 << 20)]
    yield Document(path, str(len(held)))


def flood(path: str, content: bytes) -> Iterator[Document]:
    for number in range(1 << 30):
        yield Document(f"{path}#{number}", "x" * 1000)


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


def nest(path: str, content: bytes) -> Iterator[Document]:
    metadata: dict[str, Any] = {}
    for _ in range(300):
        metadata = {"a": metadata}
    yield Document(path, "text", metadata)


def misname(path: str, content: bytes) -> Iterator[Document]:
    yield Document(f"{path}#\ud800", "text")


def give_up(path: str, content: bytes) -> Iterator[Document]:
    raise SystemExit(3)


def blurt(path: str, content: bytes) -> Iterator[Document]:
    raise ValueError("half \ud800")


def hang_up(path: str, content: bytes) -> Iterator[Document]:
    for descriptor in range(3, 16):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as end:
            end.shutdown(socket.SHUT_WR)
    time.sleep(3600)
    yield Document(path, "late")


def _say(content: bytes) -> None:
    """Write to the parent, wherever its connection is."""
    for descriptor in range(3, 64):
        with contextlib.suppress(OSError):
            os.write(descriptor, content)


def lie(path: str, content: bytes) -> Iterator[Document]:
    """Send what the process's own checks would not let out; the bytes say what."""
    _say(struct.pack("<IQ", len(content), 1) + content + b"x")
    time.sleep(3600)
    yield Document(path, "late")


def fork(path: str, content: bytes, clings: bool = False) -> Iterator[Document]:
    """Hang, and so does a child; the bytes name the file that its number goes to."""
    child = os.fork()
    if not child:
        if clings:
            os.setsid()
        time.sleep(60)
        os._exit(0)
    Path(content.decode()).write_text(str(child))
    time.sleep(60)
    yield Document(path, "late")


def cling(path: str, content: bytes) -> Iterator[Document]:
    """As `fork`, and the child is out of reach, with the parent's connection in its hands."""
    for descriptor in range(3, 16):
        with contextlib.suppress(OSError):
            os.dup(descriptor)
    yield from fork(path, content, clings=True)


def double(path: str, content: bytes) -> Iterator[Document]:
    """Come back from the loader twice."""
    os.fork()
    yield Document(path, "once")


def garble(path: str, content: bytes) -> Iterator[Document]:
    """Write what a process would that a hostile file has taken over."""
    _say(b"\xff" * 64)
    yield Document(path, "after garbage")


def modules(path: str, content: bytes) -> Iterator[Document]:
    yield Document(path, " ".join(sys.modules))


def shout(path: str, content: bytes) -> Iterator[Document]:
    yield Document(path, content.decode().upper(), {"loud": True})
