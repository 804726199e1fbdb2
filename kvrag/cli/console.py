"""Where output goes: results to stdout, everything else (banners, bars, failures) to stderr."""

from __future__ import annotations

import dataclasses
import errno
import functools
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

import typer

from kvrag.errors import KVRagError

if TYPE_CHECKING:
    from rich.console import Console


R = TypeVar("R")

# A program reads a table from a pipe, or a file keeps it, so no line is cut to fit.
_PIPE_WIDTH = 240

SECONDS_BETWEEN_LINES = 5.0
"""Seconds between two progress lines when stderr is not a terminal."""

# Control characters except tab and line feed: escape sequences can rewrite a screen or its title.
# Characters that reverse the direction of what follows can do nearly the same.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
# In a name, a line feed would begin another line, and an invisible mark would hide.
_NOT_IN_NAME = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def out() -> Console:
    """Return the console for results."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False, emoji=False)


def err() -> Console:
    """Return the console for everything except results."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, emoji=False)


def write(text: str) -> None:
    """Write text to stdout and flush it, without markup or wrapping."""
    sys.stdout.write(text)
    sys.stdout.flush()


def stream(text: str) -> None:
    """Write a piece of an answer to stdout and flush it, with control characters replaced."""
    write(harmless(text))


def harmless(text: str) -> str:
    """Replace control characters, which a terminal would obey, in a model's or document's text."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def shown_name(source: str) -> str:
    """Return a document's name for people: short, on one line, and with nothing hidden in it."""
    return one_line(short_path(source))


def one_line(text: str) -> str:
    """Return a text with control characters, line feeds too, as Python escapes them."""
    return _NOT_IN_NAME.sub(lambda found: ascii(found[0])[1:-1], text)


class AnswerText:
    """Writes an answer to stdout as it is generated, without its leading whitespace.

    Parameters
    ----------
    quiet
        Write nothing, because the answer is printed elsewhere.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet
        self.has_begun = False

    def __call__(self, text: str) -> None:
        """Write a piece."""
        piece = text if self.has_begun else text.lstrip()
        if piece and not self.quiet:
            stream(piece)
        self.has_begun = self.has_begun or bool(piece)

    def end(self) -> None:
        """End the line; report an empty answer, which would otherwise look like a failure."""
        if self.quiet:
            return
        if self.has_begun:
            write("\n")
        else:
            note("(the model's answer is empty)")


def note(text: str) -> None:
    """Write one dim line to stderr."""
    # Not wrapped, so that commands and paths in it can be copied whole.
    err().print(text, style="dim", markup=False, soft_wrap=True)


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show `what` with a spinner on stderr while the block runs (on a terminal only)."""
    with err().status(what):
        yield


class Lines:
    """Progress without a terminal: a line on stderr every few seconds, and none for short work."""

    def __init__(self) -> None:
        self._due = time.monotonic() + SECONDS_BETWEEN_LINES
        self._last = ""

    def update(self, text: str, _share: float | None = None) -> None:
        """Write the text if it has changed and the last line is old enough."""
        if text != self._last and time.monotonic() >= self._due:
            self._last = text
            self._due = time.monotonic() + SECONDS_BETWEEN_LINES
            print(harmless(" ".join(text.split())), file=sys.stderr, flush=True)


class Say(Protocol):
    """Shows another text, and perhaps what share is done."""

    def __call__(self, text: str, share: float | None = None, /) -> None: ...


@contextmanager
def progress(what: str, *, has_bar: bool = True) -> Iterator[Say]:
    """Show progress of long work on stderr: a bar on a terminal, otherwise `Lines`.

    Parameters
    ----------
    what
        The first text to show.
    has_bar
        False: somebody else draws on a terminal.

    Yields
    ------
    say
        A function that shows another text.
    """
    stderr = err()
    if not stderr.is_terminal:
        yield Lines().update
        return
    if not has_bar:
        yield lambda _text, _share=None: None
        return
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

    columns = SpinnerColumn(), BarColumn(), TextColumn("{task.description}", markup=False)
    with Progress(*columns, console=stderr, transient=True) as bar:
        task = bar.add_task(what, total=None)

        def say(text: str, share: float | None = None) -> None:
            total = None if share is None else 1.0
            bar.update(task, description=harmless(text), completed=share or 0.0, total=total)

        yield say


def print_json(value: object) -> None:
    """Print one JSON document, the only output on stdout."""
    write(json.dumps(plain(value), ensure_ascii=False, indent=2) + "\n")


def plain(value: object) -> Any:
    """Return `value` as JSON types: dataclasses as objects, paths as strings, tuples as lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        as_dict = getattr(value, "to_dict", None)
        if callable(as_dict):
            return plain(as_dict())
        fields = dataclasses.fields(value)
        return {field.name: plain(getattr(value, field.name)) for field in fields}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    return value


def count(number: int, noun: str) -> str:
    """Return a number with its noun, as in ``1 document`` and ``2,000 documents``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def format_bytes(size_bytes: float) -> str:
    """Return a size for people to read: ``1.4 MiB``."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def format_seconds(seconds: float) -> str:
    """Return a duration for people to read: ``840 us``, ``12.3 ms``, ``1.24 s``, ``3 min 05 s``."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 60:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s"


def short_path(source: str) -> str:
    """Return `source`, relative to the working directory if that is shorter."""
    if not os.path.isabs(source):  # noqa: PTH117  (a source may be any text)
        return source
    return min(os.path.relpath(source), source, key=len)


_COLUMNS: dict[str, dict[str, Any]] = {
    "text": {"no_wrap": True},
    "name": {"no_wrap": True, "style": "dim"},
    "folded": {"overflow": "fold"},
    "number": {"justify": "right", "no_wrap": True},
    # On a terminal, it has the room that the others leave.
    "begins": {"no_wrap": True, "overflow": "ellipsis", "style": "dim", "ratio": 1},
}


def print_table(
    columns: Mapping[str, str], rows: Iterable[Sequence[str]], *, show_header: bool = True
) -> None:
    """Print rows below the names of their columns, each of a kind in `_COLUMNS`."""
    from rich.table import Table
    from rich.text import Text

    has_rest = out().is_terminal and "begins" in columns.values()
    table = Table(box=None, pad_edge=False, header_style="bold", expand=has_rest)
    table.show_header = show_header
    for name, kind in columns.items():
        table.add_column(name, **_COLUMNS[kind])
    for row in rows:
        # Text, since a path or a message may contain what looks like markup.
        table.add_row(*(Text(harmless(cell)) for cell in row))
    out().print(table)


def print_pairs(pairs: Iterable[tuple[str, str]]) -> None:
    """Print names and what they are as two aligned columns."""
    print_table({"name": "name", "": "folded"}, pairs, show_header=False)


def print_fields(values: Mapping[str, Any]) -> None:
    """Print a flat mapping as two aligned columns, with readable names."""
    print_pairs(field(name, value) for name, value in values.items())


def records(say: Say) -> Callable[[int, int], None]:
    """Return what shows how many records are done."""
    return lambda done, total: say(f"{done:,} of {total:,} records")


def show(report: R, as_json: bool, as_text: Callable[[R], None]) -> None:
    """Print a report: as one JSON document, or by `as_text`."""
    if as_json:
        print_json(report)
    else:
        as_text(report)


def field(name: str, value: Any) -> tuple[str, str]:
    """Return a value's name and the value, for people."""
    label = name.removeprefix("num_").replace("_", " ")
    match value:
        case bool():
            return label, "yes" if value else "no"
        case int() | float() if name.endswith("_bytes"):
            return label.removesuffix(" bytes"), format_bytes(value)
        case int() | float() if name.endswith("seconds"):
            return label.removesuffix("seconds").strip() or "time", format_seconds(value)
        case int():
            return label, f"{value:,}"
        case float():
            # Plain digits: 3,123 is easier to read than 3.12e+03.
            return label, f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
        case list():
            return label, "\n".join(map(str, value)) or "none"
        case dict():
            return label, ", ".join(f"{key} {item}" for key, item in value.items()) or "none"
    return label, "none" if value is None else str(value)


EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
DEBUG_VARIABLE = "KVRAG_DEBUG"

P = ParamSpec("P")


def fail(message: str) -> typer.Exit:
    """Print `message` as an error and return the exit to raise."""
    # Messages may quote files that others wrote.
    text = harmless(" ".join(message.split())) or "no message was given"
    print(f"error: {text}", file=sys.stderr)
    return typer.Exit(EXIT_FAILURE)


@contextmanager
def guard() -> Iterator[None]:
    """Let an error in the block print one sentence, not a traceback."""
    try:
        yield
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except (typer.Exit, typer.Abort, typer.BadParameter):
        raise
    except Exception as error:
        if os.environ.get(DEBUG_VARIABLE):
            raise
        if isinstance(error, OSError) and error.errno == errno.EPIPE:
            raise  # The reader of stdout has closed the pipe: nothing to report.
        raise fail(_describe(error)) from None


def guarded(command: Callable[P, R]) -> Callable[P, R]:
    """Wrap a command in `guard`."""

    @functools.wraps(command)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        with guard():
            return command(*args, **kwargs)

    return wrapper


def _describe(error: Exception) -> str:
    if isinstance(error, KVRagError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        where = f": {error.filename}" if error.filename else ""
        return f"{error.strerror}{where}"
    if isinstance(error, ModuleNotFoundError) and error.name:
        return (
            f"{error.name} cannot be imported, which kvrag needs here: {error}. 'kvrag doctor' "
            "shows what is missing; 'pip install --upgrade kvrag' installs it"
        )
    kind = type(error).__name__
    return f"unexpected {kind}: {error} (`kvrag --debug ...` shows where; please report it)"
