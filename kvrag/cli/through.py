"""A running `kvrag serve` answers `kvrag query` and `kvrag chat` of the same user and index.

They talk in lines of JSON over a Unix socket in a folder that only this user may open. The server
answers by the same code as the commands (`kvrag.cli.conversation`), so that they print the same;
where it cannot, or does not answer, the commands load the model themselves and say why.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import select
import socket
import stat
import struct
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

import kvrag
from kvrag.cli import console
from kvrag.cli import options as o
from kvrag.cli.answering import Outcome, Say
from kvrag.cli.conversation import Asker
from kvrag.engine.answer import Answer, Verdict
from kvrag.engine.options import ENGINE_DEFAULTS, EngineOptions, everywhere
from kvrag.errors import KVRagError
from kvrag.ingest.schema import FILE_NAME

if TYPE_CHECKING:
    from kvrag.engine.engine import KVEngine
    from kvrag.engine.idle import Idle

logger = logging.getLogger("kvrag")

_GREETING_SECONDS = 10.0
_PING_SECONDS = 5.0
_SILENT_SECONDS = 60.0
# A client that reads nothing for so long is dropped.
_UNREAD_SECONDS = 60
# Room in memory changes no answer: the server's own counts.
_OF_SERVER = ("session_bytes", "session_store_bytes", "card_bytes", "pinned_bytes")
# Options that may be paths, which each end begins where it is.
_PATHS = ("model", "links")
# What keeps a connection from being accepted now, but not later.
_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED)
_PAUSE_SECONDS = 0.1

NoServerOption = Annotated[
    bool,
    o.setting(
        "--no-server",
        help="Load the model here, even where 'kvrag serve' of this user has it loaded.",
    ),
]


class ServerGoneError(KVRagError):
    """The server ended, or does not answer."""


class _Wire:
    """Both ends of a connection: one object of JSON a line."""

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
        found: dict[str, Any] = json.loads(line)
        return found


def _place(index: Path | str, *, makes: bool) -> Path | None:
    """Return where the socket of an index is; None if there is no safe place for one."""
    if not (hasattr(socket, "AF_UNIX") and hasattr(os, "getuid") and Path(index).is_dir()):
        return None
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    base = runtime or tempfile.gettempdir()
    folder = Path(base) / ("kvrag" if runtime else f"kvrag-{os.getuid()}")
    try:
        if makes:
            folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return None
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    if not is_own or found.st_mode & 0o077:
        console.note(f"{folder} is not used: other users may write there, or it is theirs")
        return None
    name = hashlib.sha256(os.fsencode(os.path.realpath(index))).hexdigest()[:24]
    return folder / f"{name}.sock"


def _described(opening: o.Opening, answering: o.Answering) -> dict[str, Any]:
    """Return what has to be the same at both ends."""
    options = console.plain({**opening.values, **answering.values})
    # The server has it open: no file made later has its number.
    catalog = (Path(options.pop("index")) / FILE_NAME).stat()
    for name in _PATHS:
        if options[name] is not None and Path(options[name]).exists():
            options[name] = os.path.realpath(options[name])
    if options["store"] is not None:  # perhaps with a relative path in it
        options["store"] = [options["store"], str(Path.cwd())]
    return {"version": kvrag.__version__, "index": [catalog.st_dev, catalog.st_ino], **options}


# -- the commands' end ------------------------------------------------------------------------


class Remote:
    """Answers questions as `Asker` does, in the server."""

    def __init__(self, wire: _Wire) -> None:
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
            with suppress(_StoppedError, KVRagError):
                self._outcome(lambda _kind, _text: None)
        self._sent(ask=question, options=dict(options), verifies=verifies)
        self._owes = True
        try:
            return self._outcome(say)
        except KeyboardInterrupt:
            self._sent(stop=True)
            raise
        except _StoppedError as error:
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
                raise _StoppedError
            elif "outcome" in line:
                found = line["outcome"]
                made = {"answer": _made(Answer, found["answer"]), "known": tuple(found["known"])}
                return Outcome(**{**found, **made, "verdict": _made(Verdict, found["verdict"])})


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
    path = _place(opening.index, makes=False)
    if path is None or not path.exists():
        return None
    try:
        same = _described(opening, answering)
    except OSError:  # there is no whole index
        return None
    connection = held.enter_context(socket.socket(socket.AF_UNIX))
    connection.settimeout(_GREETING_SECONDS)
    try:
        connection.connect(os.fspath(path))
    except OSError:  # of a server that was killed
        return None
    wire = _Wire(connection)
    try:
        wire.send(
            same=same,
            k=searching.k,
            filter=searching.filter,
            rerank=searching.rerank,
            no_chat=searching.no_chat,
            history=history,
        )
        said = wire.receive()
    except (OSError, ValueError, EOFError) as error:
        said = {"no": str(_gone(error))}
    if "error" in said:
        raise KVRagError(said["error"])
    if "no" in said:
        console.note(f"a running 'kvrag serve' is not asked: {said['no']}; loading the model here")
        return None
    connection.settimeout(_SILENT_SECONDS)
    return Remote(wire)


def _gone(error: Exception) -> ServerGoneError:
    how = "does not answer" if isinstance(error, TimeoutError) else "ended before it had answered"
    return ServerGoneError(f"'kvrag serve' {how}; ask again, or give --no-server")


def _made(kind: Any, value: Any) -> Any:
    """Return what `dataclasses.asdict` has taken apart, by its type."""
    if value is None:
        return None
    if get_origin(kind) is tuple:
        one, *_ = kinds = get_args(kind)
        return tuple(map(_made, kinds if ... not in kinds else [one] * len(value), value))
    for one in (kind, *get_args(kind)):
        if is_dataclass(one):
            hints = get_type_hints(one)
            return one(
                **{each.name: _made(hints[each.name], value[each.name]) for each in fields(one)}
            )  # type: ignore[operator]
    return value


# -- the server's end -------------------------------------------------------------------------


class _StoppedError(Exception):
    """The client wants no answer any more."""


@dataclass
class _Listener:
    """Answers connections, each in its thread."""

    engine: KVEngine
    idle: Idle
    same: dict[str, Any]
    is_ending: bool = False
    is_cut: bool = False

    def __post_init__(self) -> None:
        self.open: dict[socket.socket, threading.Thread] = {}

    def accept(self, listener: socket.socket) -> None:
        """Accept connections until the listener is closed."""
        while True:
            try:
                connection, _ = listener.accept()
            except OSError as error:
                if error.errno not in _PASSING:
                    return
                time.sleep(_PAUSE_SECONDS)
                continue
            connection.setsockopt(
                socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _UNREAD_SECONDS, 0)
            )
            thread = threading.Thread(
                target=self._serve, args=[connection], name="kvrag-command", daemon=True
            )
            self.open[connection] = thread
            thread.start()

    def end(self, grace_seconds: float) -> None:
        """End the connections; answers that have begun may go on for a while."""
        self.is_ending = True
        due = time.monotonic() + grace_seconds
        for connection, thread in [*self.open.items()]:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RD)
            thread.join(max(0.0, due - time.monotonic()))
        self.is_cut = True
        for thread in [*self.open.values()]:
            thread.join()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError, ValueError, EOFError):
            self._converse(connection, _Wire(connection))
        self.open.pop(connection, None)

    def _converse(self, connection: socket.socket, wire: _Wire) -> None:
        from kvrag.engine.asking import Asking

        hello = wire.receive()
        if (why := self._unfit(hello)) is not None:
            wire.send(no=why)
            return
        asking = Asking(hello["k"], hello["filter"], use_chat_template=not hello["no_chat"])
        try:
            asker = Asker(self.engine, asking, hello["history"], self.idle)
        except KVRagError as error:
            wire.send(error=str(error))
            return
        wire.send(ready=True)
        # It takes no KV of other conversations: a separate process would have none.
        given = {name: hello["same"][name] for name in ENGINE_DEFAULTS} | {
            "session": uuid.uuid4().hex
        }

        heard = select.poll()
        heard.register(connection, select.POLLIN)

        def say(kind: str, text: str) -> None:
            is_stopped = not self.is_ending and heard.poll(0)
            if is_stopped or self.is_cut:
                raise _StoppedError
            wire.send(say=[kind, text])

        while True:
            line = wire.receive()
            if "forget" in line:
                asker.forget()
            elif "ask" in line:
                self._answer(asker, line, say, given, wire)

    def _answer(
        self, asker: Asker, line: dict[str, Any], say: Say, given: dict[str, Any], wire: _Wire
    ) -> None:
        options = {**given, **line["options"]}
        try:
            with _pinged(wire):
                found = asker.ask(line["ask"], say, options, verifies=line["verifies"])
            wire.send(outcome=asdict(found))
        except _StoppedError:
            wire.send(stopped=True)
        except KVRagError as error:
            wire.send(error=str(error))
        except OSError:
            raise
        except Exception as error:
            logger.exception("a question over the socket failed")
            wire.send(error=f"unexpected {type(error).__name__} in 'kvrag serve': {error}")

    def _unfit(self, hello: dict[str, Any]) -> str | None:
        """Return why this server would not answer as the command by itself; None if it would."""
        asked, own = hello["same"], self.same
        if asked["version"] != own["version"]:
            return f"it is of version {own['version']}"
        if asked["index"] != own["index"]:
            return "its index was replaced"
        if hello["rerank"] is not None:
            return "it does not rerank for commands"
        usual = everywhere(EngineOptions)
        for name, value in asked.items():
            is_by_answer = name in ENGINE_DEFAULTS and value is not None
            is_of_server = name in _OF_SERVER and value == usual[name].default
            if value != own[name] and not (is_by_answer or is_of_server):
                option = f"--{name.replace('_', '-')}"
                return f"its {option} is {own[name]}, not {value}"
        return None


@contextmanager
def _pinged(wire: _Wire) -> Iterator[None]:
    """Tell the client now and then that the server lives."""
    ended = threading.Event()

    def ping() -> None:
        with suppress(OSError):
            while not ended.wait(_PING_SECONDS):
                wire.send(ping=True)

    thread = threading.Thread(target=ping, name="kvrag-ping", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def listening(
    engine: KVEngine, idle: Idle, opening: o.Opening, answering: o.Answering, grace_seconds: float
) -> Iterator[None]:
    """Answer `kvrag query` and `kvrag chat` of the same index, until the block ends."""
    path = _place(opening.index, makes=True)
    if path is None:
        yield
        return
    with socket.socket(socket.AF_UNIX) as listener:
        unfinished = path.with_suffix(f".{os.getpid()}")
        try:
            unfinished.unlink(missing_ok=True)
            listener.bind(os.fspath(unfinished))
            unfinished.chmod(0o600)
            listener.listen()
            inode = unfinished.stat().st_ino
            unfinished.replace(path)  # of a server that was killed, or that others ask from now on
        except OSError as error:
            console.note(f"'kvrag query' will not ask this server: {error}")
            yield
            return
        answers = _Listener(engine, idle, _described(opening, answering))
        thread = threading.Thread(
            target=answers.accept, args=[listener], name="kvrag-commands", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            with suppress(OSError):
                if path.stat().st_ino == inode:
                    path.unlink()
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
            thread.join()
            answers.end(grace_seconds)
