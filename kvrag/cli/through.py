"""A running `kvrag serve` answers `kvrag query` and `kvrag chat` of the same user and index.

They talk in lines of JSON over a Unix socket in a folder that only this user may open. The server
answers by the same code as the commands (`kvrag.cli.conversation`), so that they print the same;
where it cannot, or does not answer, the commands load the model themselves and say why.

This is the commands' end, and what both ends share; the server's is `kvrag.cli.listening`.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import stat
import tempfile
import threading
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import is_dataclass
from itertools import cycle
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import kvrag
from kvrag.cli import console
from kvrag.cli import options as o
from kvrag.cli.answering import Outcome, Say
from kvrag.errors import KVRagError
from kvrag.ingest import CATALOG_NAME

# What computes, and whether stored KV is taken: these change answers.
_VARIABLES = ("KVRAG_ISA", "KVRAG_NEVER_SLOWER", "KVRAG_CUDA_GRAPHS", "KVRAG_GPU_KERNELS")
_GREETING_SECONDS = 10.0
_SILENT_SECONDS = 60.0
# Options that may be paths, which each end begins where it is.
_PATHS = ("model", "links")

NoServerOption = Annotated[
    bool,
    o.setting(
        "--no-server",
        help="Load the model here, even where 'kvrag serve' of this user has it loaded.",
    ),
]


class ServerGoneError(KVRagError):
    """The server ended, or does not answer."""


class StoppedAnswerError(Exception):
    """The command wants no answer any more."""


class Wire:
    """Either end of a connection: one object of JSON a line."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._rest = b""
        self._sending = threading.Lock()

    def send(self, **line: Any) -> None:
        """Send a line. Raises OSError."""
        with self._sending:
            self._connection.sendall(json.dumps(line).encode() + b"\n")

    def receive(self) -> dict[str, Any]:
        """Return the next line. Raises OSError and ValueError; EOFError at the end."""
        while b"\n" not in self._rest:
            data = self._connection.recv(1 << 16)
            if not data:
                raise EOFError
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        found = json.loads(line)
        if not isinstance(found, dict):
            raise ValueError(f"expected an object, found {found!r:.50}")
        return found


def place(index: Path | str, *, makes: bool) -> Path | None:
    """Return the socket of an index's server; None if there is no safe place for one."""
    if not (hasattr(socket, "AF_UNIX") and hasattr(os, "getuid") and Path(index).is_dir()):
        return None
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    base = runtime or tempfile.gettempdir()
    folder = Path(base) / ("kvrag" if runtime else f"kvrag-{os.getuid()}")
    try:
        if makes:
            folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        if makes:
            console.note(f"'kvrag query' will not ask this server: {error}")
        return None
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    if not is_own or found.st_mode & 0o077:
        console.note(f"{folder} is not used: other users may write there, or it is theirs")
        return None
    name = hashlib.sha256(os.fsencode(os.path.realpath(index))).hexdigest()[:24]
    return folder / f"{name}.sock"


def described(opening: o.Opening, answering: o.Answering) -> dict[str, Any]:
    """Return what has to be the same at both ends."""
    options = console.plain({**opening.values, **answering.values})
    # The server has it open: no file made later has its number.
    catalog = (Path(options.pop("index")) / CATALOG_NAME).stat()
    for name in _PATHS:
        if options[name] is not None and Path(options[name]).exists():
            options[name] = os.path.realpath(options[name])
    if options["store"] is not None:  # perhaps with a relative path in it
        options["store"] = [options["store"], str(Path.cwd())]
    options |= {name: os.environ.get(name) or None for name in _VARIABLES}
    return {"version": kvrag.__version__, "index": [catalog.st_dev, catalog.st_ino], **options}


class Remote:
    """Answers questions as `Asker` does, in the server."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._owes = False  # the end of an answer that nobody waits for

    def forget(self) -> None:
        """Begin a new conversation."""
        self._sent(forget=True)

    def ask(
        self, question: str, say: Say, options: Mapping[str, Any], *, verifies: bool = False
    ) -> Outcome:
        """Answer a question; see `Asker.ask`. Raises ServerGoneError."""
        if self._owes:
            with suppress(StoppedAnswerError, KVRagError):
                self._outcome(lambda _kind, _text: None)
        self._sent(ask=question, options=dict(options), verifies=verifies)
        self._owes = True
        try:
            return self._outcome(say)
        except KeyboardInterrupt:
            self._sent(stop=True)
            raise
        except StoppedAnswerError as error:
            raise _gone(error) from error

    def _sent(self, **line: Any) -> None:
        try:
            self._wire.send(**line)
        except OSError as error:
            raise _gone(error) from error

    def _outcome(self, say: Say) -> Outcome:
        while True:
            try:
                line = self._wire.receive()
            except (OSError, ValueError, EOFError) as error:
                raise _gone(error) from error
            self._owes = not {"error", "stopped", "outcome"} & line.keys()
            if "say" in line:
                say(*line["say"])
            elif "error" in line:
                raise KVRagError(line["error"])
            elif "stopped" in line:
                raise StoppedAnswerError
            elif "outcome" in line:
                outcome: Outcome = _made(Outcome, line["outcome"])
                return outcome


def _made(kind: Any, value: Any) -> Any:
    """Return what `dataclasses.asdict` and JSON have taken apart, by its type."""
    kinds = [one for one in get_args(kind) if one is not ...]
    if isinstance(value, list):
        return tuple(map(_made, cycle(kinds), value))
    for one in (kind, *kinds):
        if is_dataclass(one) and value is not None:
            hints = get_type_hints(one)
            return one(**{name: _made(hints[name], each) for name, each in value.items()})  # type: ignore[operator]
    return value


def connected(
    held: ExitStack,
    opening: o.Opening,
    searching: o.Searching,
    answering: o.Answering,
    history: int | None = 0,
) -> Remote | None:
    """Return what answers in a running server of the index, until the stack ends; or None.

    Raises
    ------
    KVRagError
        If the server refuses the conversation as a whole.
    """
    path = place(opening.index, makes=False)
    if path is None or not path.exists():
        return None
    with ExitStack() as own:
        try:
            number = path.stat().st_ino
            same = described(opening, answering)
            connection = own.enter_context(socket.socket(socket.AF_UNIX))
            connection.settimeout(_GREETING_SECONDS)
            connection.connect(os.fspath(path))
        except ConnectionRefusedError:  # of a server that was killed
            with suppress(OSError):
                if path.stat().st_ino == number:  # no new server's
                    path.unlink()
            return None
        except OSError:  # there is no whole index, or the server has ended meanwhile
            return None
        names = ("k", "filter", "rerank", "no_chat")
        wire = Wire(connection)
        try:
            wire.send(same=same, history=history, **{one: getattr(searching, one) for one in names})
            said = wire.receive()
        except (OSError, ValueError, EOFError) as error:
            said = {"no": str(_gone(error))}
        if "error" in said:
            raise KVRagError(said["error"])
        if "no" not in said:
            connection.settimeout(_SILENT_SECONDS)
            held.enter_context(own.pop_all())
            return Remote(wire)
    console.note(f"a running 'kvrag serve' is not asked: {said['no']}; loading the model here")
    return None


def _gone(error: Exception) -> ServerGoneError:
    how = "does not answer" if isinstance(error, TimeoutError) else "ended before it had answered"
    return ServerGoneError(f"'kvrag serve' {how}; ask again, or give --no-server")
