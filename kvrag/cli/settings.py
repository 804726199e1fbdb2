"""Options given in a file ``kvrag.toml``, for every command.

The command line overrides the file, and the file overrides the default. A setting that has no
effect is an error: an unknown command or key, or a value of the wrong type.
"""

from __future__ import annotations

import functools
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from kvrag import arguments
from kvrag.codec.names import COMPRESSION_GONE
from kvrag.engine.options import AnswerOptions, everywhere
from kvrag.errors import ParameterError
from kvrag.regularfile import read_regular

FILE_NAME = "kvrag.toml"
VARIABLE = "KVRAG_CONFIG"

COMMON = ("index", "model", "device", "store")
"""Keys that a file may set outside its tables, for every command that has the option."""

HARMLESS = frozenset(
    {
        *(name.replace("_", "-") for name in everywhere(AnswerOptions)),
        *("chunk-tokens", "codec", "compute", "device", "dry-run", "dtype"),
        *("history", "index", "json", "k", "dense", "sparse"),
    }
)
"""Keys that a file may set even if the user did not name it.

The author of the folder's documents may have left it there. None of these keys names a path, an
address, a model or code, or disables a check; `index` is checked.
"""

_COMPRESSION_GONE = f"is gone. {COMPRESSION_GONE}"
_CALIBRATE_GONE = (
    "is gone: 'kvrag calibrate' asks about the index itself, and 'kvrag bench quality' compares "
    "contexts, and policies with questions from a file"
)
_RATES_GONE = (
    "is gone: with --ray, --dry-run says the tokens; divide them by what your machines compute in "
    "a second"
)
GONE = {
    **dict.fromkeys([("calibrate", "data"), ("calibrate", "contexts")], _CALIBRATE_GONE),
    **dict.fromkeys([("ingest", "ray-rate"), ("ingest", "ray-price")], _RATES_GONE),
    ("serve", "artefacts"): "is gone: kvrag fuses each prompt in vLLM's own process",
    ("bench quality", "jobs"): "is gone: start a process for each set of --data",
    ("bench codec", "out"): "is gone: the table says what the picture showed",
    ("ingest", "compress"): _COMPRESSION_GONE,
    ("bench quality", "compress"): _COMPRESSION_GONE,
    ("train links", "anchors"): _COMPRESSION_GONE,
}
"""What replaces each command's option of an earlier version."""

# More than anybody writes. The time to parse a key grows with the square of its dots: 16,000 take
# seconds.
_MAX_BYTES = 16_000

# It has the options that all commands may share.
_USUAL = ("query",)

Place = tuple[str, ...]
"""A command's name, preceded by the names of its groups; empty for all commands."""


@dataclass(frozen=True)
class SettingsFile:
    """A settings file that was read and checked.

    Attributes
    ----------
    path
        The file's path.
    is_named
        Whether the user named it; otherwise it was found in the working directory.
    tables
        The settings of each command by key: ``("bench", "ttft")``; ``()`` has those of all.
    """

    path: Path
    is_named: bool
    tables: Mapping[Place, Mapping[str, Any]]

    def of(self, place: Place, keys: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings for a command, by key."""
        common = {name: one for name, one in self.tables.get((), {}).items() if name in keys}
        return {**common, **self.tables.get(place, {})}


def command_of(place: Place, root: Any, context: Any) -> Any:
    """Return a command or a group. Raises ParameterError if there is none."""
    found = root
    for number, name in enumerate(place, start=1):
        said = f"'kvrag {arguments.cut(' '.join(place[:number]))}'"
        known = found.list_commands(context) if hasattr(found, "list_commands") else []
        if name not in known:
            if gone := getattr(found, "gone", {}).get(name):
                raise ParameterError(f"{said} {gone}")
            more = f"; expected {', '.join(known)}" if known else ""
            like = arguments.like(name, known)
            raise ParameterError(f"there is no command {said}{like}{more}")
        found = found.get_command(context, name)
    return found


def keys_of(command: Any) -> dict[str, Any]:
    """Return a command's own options by key, their names without dashes: ``max-tokens``."""
    return {
        max(one.opts, key=len).lstrip("-"): one
        for one in command.params
        if one.param_type_name == "option" and one.expose_value
    }


def find_file(named: Path | None) -> tuple[Path, bool] | None:
    """Return the settings file and whether the user named it, or None if there is no file."""
    if named is not None:
        return arguments.path(named, "--config"), True
    if given := os.environ.get(VARIABLE):
        path = arguments.path(given, VARIABLE)
        if not path.is_absolute():
            # A relative path would be trusted in every working directory.
            raise ParameterError(f"{VARIABLE} {arguments.shown(given)}: expected an absolute path")
        return path, True
    found = Path(FILE_NAME)
    # Whatever has the name is read, or refused if it is no regular file.
    return (found, False) if os.path.lexists(found) else None


def read_file(named: Path | None, root: Any, context: Any) -> SettingsFile | None:
    """Read the settings file, and check everything in it.

    Parameters
    ----------
    named
        The file, or None to look for it (`find_file`).
    root, context
        The group of all commands, and a context for looking them up.

    Raises
    ------
    ParameterError
        When it cannot be read, or when a setting in it has no effect.
    """
    place = find_file(named)
    if place is None:
        return None
    path, is_named = place
    text = _text(path)
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # a number or date can be too long to read
        found = ""
        if at := re.search(r"at (?:line (\d+)|end)", str(error)):
            found = f", found {arguments.shown(text.splitlines()[int(at[1] or 0) - 1])}"
        raise ParameterError(
            f"{path} is not TOML: {error}{found}; name each key and table once, and quote text"
        ) from error
    tables: dict[Place, dict[str, Any]] = {}
    find = functools.cache(lambda place: command_of(place, root, context))
    try:
        for table, name, value in _entries(document, find):
            if value == "none" and GONE.get((" ".join(table), name)) is _COMPRESSION_GONE:
                continue  # as it is always now
            option = _option(table, name, find(table or _USUAL), context)
            where = f"[{'.'.join(table)}] {name}" if table else name
            taken = _taken(where, value, option, context)
            if isinstance(taken, Path):  # relative to the file, not to the working directory
                taken = arguments.path(path.parent / arguments.path(value, where), where)
                value = str(taken)
            if not is_named:
                _check_harmless(where, name, taken, path)
            tables.setdefault(table, {})[name] = value
    except ParameterError as error:
        raise ParameterError(f"{path}: {error}") from error
    return SettingsFile(path, is_named, tables)


def _entries(
    document: Mapping[str, Any], find: Callable[[Place], Any], place: Place = ()
) -> Iterator[tuple[Place, str, Any]]:
    """Yield each key with its command's place and its value."""
    is_group = hasattr(find(place), "list_commands")
    for name, value in document.items():
        if is_group and isinstance(value, dict):
            yield from _entries(value, find, (*place, name))
        else:
            yield place, name, value


def _option(place: Place, name: str, command: Any, context: Any) -> Any:
    """Return the option that a key stands for."""
    shown, said = arguments.shown(name), " ".join(place)
    if not place and name not in COMMON:
        raise ParameterError(
            f"{shown} is no key for all commands{arguments.like(name, COMMON)}; expected "
            f"{', '.join(COMMON)} outside tables; one command's option belongs in its table, such "
            "as [query]"
        )
    if hasattr(command, "list_commands"):
        raise ParameterError(
            f"{said!r} is a group of commands: expected tables such as "
            f"[{'.'.join(place)}.{command.list_commands(context)[0]}], found {shown}"
        )
    if not hasattr(command, "keys"):  # that of another distribution
        raise ParameterError(f"'kvrag {said}': {command.help}")
    if option := command.keys.get(name):
        return option
    if gone := GONE.get((said, name)):
        raise ParameterError(f"{name} {gone}")
    known = arguments.like(name, command.keys) or f"; it has {', '.join(sorted(command.keys))}"
    raise ParameterError(f"'kvrag {said}' has no option {shown}{known}")


def _taken(where: str, value: Any, option: Any, context: Any) -> Any:
    """Return what an option makes of a value."""
    kind = option.type_descriptor.annotation
    if option.is_flag:
        is_right, expected = isinstance(value, bool), "true or false"
    elif option.multiple:
        is_right = isinstance(value, list) and all(isinstance(one, str) for one in value)
        expected = "a list of texts"
    else:  # to Python, a flag is a number; an empty path would mean the working directory
        expected = "a number" if kind in (int, float) else "text"
        right = str | int | float if kind in (int, float, Any) else str
        is_right = isinstance(value, right) and not isinstance(value, bool) and value != ""
    try:
        if not is_right:
            raise TypeError(f"expected {expected}")
        # As the command line gives it to a parser of kvrag's own.
        return option.process_value(context, str(value) if kind is Any else value)
    except (typer.BadParameter, TypeError) as error:
        why = getattr(error, "message", error)
        raise ParameterError(f"{where} = {arguments.shown(value)}: {why}") from error


def _text(path: Path) -> str:
    if str(path) == os.devnull:
        return ""  # the usual name for no settings
    try:
        return read_regular(path, _MAX_BYTES).decode("utf-8-sig")  # some editors mark it so
    except OSError as error:
        is_dangling = path.is_symlink() and not path.exists()
        reason = "it is a link to nothing" if is_dangling else error.strerror
        raise ParameterError(
            f"{path} cannot be read: {reason}; name another with --config, or {os.devnull} for none"
        ) from error
    except UnicodeDecodeError as error:
        raise ParameterError(f"{path} is not UTF-8: {error}; save it as UTF-8") from error


def _check_harmless(where: str, name: str, taken: Any, path: Path) -> None:
    """Raise ParameterError for a setting that is allowed only in a file that the user named."""
    if name == "index":
        problem = _foreign_index(taken, path.absolute().parent.resolve())
    elif name in HARMLESS and not isinstance(taken, Path):
        return
    else:
        problem = "it can name a path, a model or code, or disable a check"
    if problem:
        raise ParameterError(
            f"{where} = {arguments.shown(str(taken))}: {problem}; {path} was found, not named: if "
            f"you trust it, name it with --config {path}, or set {VARIABLE} to its absolute path"
        )


def _foreign_index(value: Path | str, folder: Path) -> str:
    """Return why an index leads outside a folder, or "" if it does not."""
    from kvrag.ingest import config

    index = Path(value).resolve()
    if arguments.is_url(value) or not index.is_relative_to(folder):
        return f"expected a folder in {folder}"
    if not (index / config.FILE_NAME).exists():
        return ""
    made = config.IndexConfig.load(index)
    if made.store:
        return f"its KV is elsewhere, in {made.store}"
    if Path(made.embedding).name != made.embedding:
        return f"its embedding is in {made.embedding}"
    return ""
