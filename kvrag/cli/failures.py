"""One clear line for each error, and the exit code: 1, or 130 on interrupt."""

from __future__ import annotations

import errno
import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import typer

from kvrag.cli import console
from kvrag.errors import KVRagError

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
DEBUG_VARIABLE = "KVRAG_DEBUG"

P = ParamSpec("P")
R = TypeVar("R")


def fail(message: str) -> typer.Exit:
    """Print `message` as an error and return the exit to raise."""
    # Messages may quote files that others wrote.
    text = console.harmless(" ".join(message.split())) or "no message was given"
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
