"""Parse files into documents in a separate process, within limits.

Whatever a file does to its parser (an exception, a crash, a hang, all memory, endless output)
becomes one `DocumentError`, and parsing continues with the next file.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from multiprocessing.spawn import get_executable
from typing import IO, Any, Self

from kvrag.arguments import cut, shown
from kvrag.chunk import Document
from kvrag.errors import DocumentError, ParameterError, ParserError
from kvrag.ingest.files import is_storable, printable
from kvrag.ingest.filters import plain_metadata
from kvrag.ingest.headings import checked_outline
from kvrag.ingest.limits import MAX_DOCUMENTS, ParseLimits
from kvrag.ingest.loaders import NoTextError, sought_suffixes
from kvrag.ingest.worker import OUT_OF_MEMORY, pack_frame, read_frame

# The parent's own search path: the child finds the same kvrag and the same additional loaders.
_MAIN = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from kvrag.ingest.worker import main; main()"
)
_START_SECONDS = 60.0  # loaders may import much
_MAX_REASON_CHARACTERS = 10_000
_EXIT_SECONDS = 1.0  # from a closed connection to the exit code


def check_loaders(loaders: Mapping[str, str]) -> dict[str, str]:
    """Return additional loaders, by suffix in lower case.

    Raises
    ------
    ParameterError
        When one is not of the form ``{".odp": "package.module:function"}``, or its module is
        not found. Nothing is imported.
    """
    if not isinstance(loaders, Mapping):
        raise ParameterError(
            f"loaders {shown(loaders)}: expected a mapping such as "
            "{'.odp': 'package.module:function'}"
        )
    for suffix, name in loaders.items():
        given = cut(f"{suffix}={name}")
        is_text = isinstance(suffix, str) and isinstance(name, str)
        module, _, function = name.partition(":") if is_text else ("", "", "")
        if not module or not suffix.startswith(".") or not function.isidentifier():
            raise ParameterError(
                f"loader {given}: expected a suffix with its dot and where the loader "
                "is, as in .odp=package.module:function"
            )
        top = module.partition(".")[0]
        if not _is_found(top):
            raise ParameterError(
                f"loader {given}: no module {shown(top)} is found; install it, or name its "
                "folder in PYTHONPATH (PYTHONPATH=. for the current one, which is not searched)"
            )
    return {suffix.lower(): name for suffix, name in loaders.items()}


def _is_found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ValueError, OSError):  # no name of a module, or one that was imported from nowhere
        return False


class Parser:
    """Parses files in a process that starts with the first of them.

    Parameters
    ----------
    limits
        Limits on the cost of a file.
    loaders
        Additional loaders, which take precedence over the built-in ones:
        ``{".odp": "package.module:function"}``, a function of the file's path and bytes that
        yields `Document`.

    Raises
    ------
    ParameterError
        When `limits` is no `ParseLimits`, or a loader has another form, or its module is not found.
    """

    def __init__(
        self, limits: ParseLimits | None = None, loaders: Mapping[str, str] | None = None
    ) -> None:
        if not isinstance(limits, ParseLimits | None):
            raise ParameterError(f"limits {shown(limits)}: expected a ParseLimits")
        self.limits = limits or ParseLimits()
        self.loaders = check_loaders({} if loaders is None else loaders)
        self.suffixes = sought_suffixes() | self.loaders.keys()
        self._process: _Process | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process, whatever it is doing."""
        if self._process is not None:
            self._process.kill()
            self._process = None

    def start(self) -> None:
        """Start the process unless it runs; ParserError if it, or a loader in it, cannot be."""
        if self._process is None:
            self._process = _Process(self.limits, self.loaders)

    def parse(self, path: str, content: bytes) -> list[Document]:
        """Return the documents in a file's bytes.

        Raises
        ------
        DocumentError
            When the file cannot be parsed, or only beyond the limits.
        NoTextError
            When the file holds no text.
        ParserError
            When the process cannot be started.
        """
        while True:
            is_fresh = self._process is None
            self.start()
            assert self._process is not None
            try:
                return self._process.parse(path, content)
            except _GoneError as gone:
                self.close()
                # Leftovers of earlier files may be the cause, except of a timeout.
                if is_fresh or gone.is_late:
                    raise DocumentError(f"{path}: {gone}") from None
            except DocumentError:
                raise
            except BaseException:
                self.close()
                raise


class _GoneError(Exception):
    """The process ended without an answer, or sent one that no honest process sends."""

    def __init__(self, message: str, is_late: bool = False) -> None:
        super().__init__(message)
        self.is_late = is_late


class _Process:
    """One parsing process, until it exits or is killed."""

    def __init__(self, limits: ParseLimits, loaders: Mapping[str, str]) -> None:
        self._limits = limits
        self._is_late = False
        self._has_ended = False
        self._ending = threading.Lock()
        command = [get_executable(), "-c", _MAIN, json.dumps(sys.path)]
        try:
            self._start(command)
        except OSError as error:
            raise ParserError(
                f"the process that parses documents cannot be started ({error.strerror or error})"
            ) from error
        settings = {
            "loaders": dict(loaders),
            "memory_bytes": limits.memory_bytes,
            "max_characters": limits.max_file_bytes,
        }
        try:
            with self._deadline(_START_SECONDS):
                self._send(settings)
                head, _ = self._receive()
        except _GoneError as error:
            self.kill()
            raise ParserError(
                "the process that parses documents ended, or hung, before it was ready"
            ) from error
        except BaseException:
            self.kill()
            raise
        if head.get("end") != "ready":
            self.kill()
            raise ParserError(f"a loader cannot be imported: {head.get('reason')}")

    def _start(self, command: list[str]) -> None:
        """Start the process in a separate process group.

        An interrupt at the terminal then reaches only the parent, and what a loader has started
        can be ended together with the process.
        """
        # No pipes: a read from a pipe blocks as long as any process holds the other end, but a
        # socket can be shut down from here.
        ours, theirs = socket.socketpair()
        with theirs:
            for end in (ours, theirs):
                end.settimeout(None)  # whatever socket.setdefaulttimeout says
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    stderr=subprocess.DEVNULL,
                    process_group=0,
                )
            except BaseException:
                ours.close()
                raise
        self._socket = ours
        self._requests: IO[bytes] = ours.makefile("wb")
        self._answers: IO[bytes] = ours.makefile("rb")

    def parse(self, path: str, content: bytes) -> list[Document]:
        with self._deadline(self._limits.seconds):
            self._send({"path": path}, content)
            documents = self._documents(path)
        if self._is_late:  # the deadline passed just after the answer
            raise self._gone()
        return documents

    def kill(self) -> None:
        self._end()
        for stream in (self._requests, self._answers, self._socket):
            with contextlib.suppress(OSError):  # input that it did not read
                stream.close()

    def _end(self) -> int:
        """End the process and its group, wake the waiting reader, and return the exit code."""
        with self._ending:  # the deadline's thread may be here too
            if not self._has_ended:
                self._has_ended = True
                with contextlib.suppress(OSError):  # the group is empty
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._process.kill()
                # A process that has left the group may still hold the other end.
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)
            return self._process.wait()

    def _documents(self, path: str) -> list[Document]:
        """Receive the documents of a file; the process is untrusted once it has seen a file."""
        documents: list[Document] = []
        room = self._limits.max_file_bytes
        parts = set[str]()
        while True:
            head, body = self._receive()
            if "end" in head:
                break
            part, metadata, text = head.get("part"), head.get("metadata"), _decode(body)
            room -= len(text)
            if room < 0 or len(documents) >= MAX_DOCUMENTS:
                raise _GoneError("its loader returned more than the limits allow")
            if not isinstance(part, str) or not isinstance(metadata, dict):
                raise _GoneError("its loader returned something that is not a document")
            if part in parts or (part and not part.startswith("#")):
                raise _GoneError(
                    f"its loader gave the source {path + part!r}; expected the path, or the path "
                    "with '#' and a name for the part, each once"
                )
            parts.add(part)
            # The process has checked both, but its output is checked here like anybody's.
            if not is_storable(part):
                raise _GoneError("its loader gave a source that is not valid Unicode")
            try:
                metadata = plain_metadata(metadata)
                outline = checked_outline(head.get("outline"), text)
            except DocumentError as error:
                raise _GoneError(str(error)) from None
            documents.append(Document(path + part, text, metadata, outline=outline))
        reason = printable(str(head.get("reason"))[:_MAX_REASON_CHARACTERS])
        if head["end"] == "no text":
            raise NoTextError(reason)
        if head["end"] != "done":
            raise DocumentError(reason)
        return documents

    def _send(self, head: dict[str, Any], body: bytes = b"") -> None:
        try:
            for piece in pack_frame(head, body):
                self._requests.write(piece)
            self._requests.flush()
        except OSError:
            raise self._gone() from None

    def _receive(self) -> tuple[dict[str, Any], bytes]:
        try:
            # A character takes at most four bytes.
            frame = read_frame(self._answers, 4 * self._limits.max_file_bytes)
        except OSError:  # it ended before it had read everything that was sent
            raise self._gone() from None
        except ValueError as error:
            raise _GoneError(str(error)) from error
        if frame is None:
            raise self._gone()
        return frame

    def _gone(self) -> _GoneError:
        # It has closed its end. Give it time to exit, so that its exit code says why.
        if not self._is_late:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_EXIT_SECONDS)
        has_exited = self._process.returncode is not None
        code = self._end()
        if self._is_late:
            return _GoneError(
                f"parsing it took longer than {self._limits.seconds:g} s; split it, or raise the "
                "limit (--parse-seconds ..., or ParseLimits.seconds)",
                is_late=True,
            )
        if not has_exited:
            return _GoneError("its parser closed its connection without an answer and did not exit")
        if code in (OUT_OF_MEMORY, -signal.SIGKILL):
            return _GoneError(
                f"parsing it takes more than {self._limits.memory_bytes / 2**20:,.0f} MiB of "
                "memory; split it, or raise the limit (--parse-memory ..., or "
                "ParseLimits.memory_bytes)"
            )
        how = signal.strsignal(-code) if code < 0 else f"exit code {code}"
        return _GoneError(f"its parser crashed ({how})")

    @contextlib.contextmanager
    def _deadline(self, seconds: float) -> Iterator[None]:
        """End the process if the block takes longer."""

        def end() -> None:
            self._is_late = True
            self._end()

        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()


def _decode(body: bytes) -> str:
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        raise _GoneError("its loader gave no valid text") from error
