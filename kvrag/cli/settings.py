"""Options given in a file ``kvrag.toml``, for every command.

The command line overrides the file, and the file overrides the default. A setting that has no
effect is an error: an unknown command or key, or a value of the wrong type.
"""

from __future__ import annotations

import functools
import os
import re
import tomllib
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
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

# Far more than anybody writes. The time to parse a line grows with the square of its dots.
_MAX_BYTES = 64_000
_MAX_LINE = 2_000
_MAX_DOTS = 20
# Strings in one line; the dots in them cost nothing.
_QUOTED = re.compile(r""""[^"]*"|'[^']*'""")
_NUMBERS = (int, float)
# By the kind of a key: the types of TOML's values, and what they are.
_KINDS: dict[Any, tuple[Any, str]] = {
    bool: (bool, "true or false"),
    int: (int, "a whole number"),
    float: ((int, float), "a number"),
    Path: (str, "a path"),
}
_TEXT = (str, "text")


@dataclass(frozen=True)
class Key:
    """An option under its name in settings, without leading dashes: ``max-tokens``.

    Attributes
    ----------
    name
        The name.
    parameter, info
        The command's parameter, and what Typer knows of it.
    kind
        `bool`, `int`, `float` or `Path`; anything else is text.
    is_list
        Whether it may be given more than once.
    """

    name: str
    parameter: Any
    info: Any
    kind: type
    is_list: bool

    @property
    def expected(self) -> str:
        """A description of the values that it accepts."""
        if self.is_list:
            return "a list of texts"
        _, noun = _KINDS.get(self.kind, _TEXT)
        least, most = self.info.min, self.info.max
        if self.kind not in _NUMBERS or least is None:
            return noun
        return f"{noun} from {least:g}" + ("" if most is None else f" to {most:g}")

    def accepts(self, value: Any) -> bool:
        """Return whether a value has this key's type and is in its range."""
        if self.is_list:
            return isinstance(value, list) and all(isinstance(one, str) for one in value)
        types, _ = _KINDS.get(self.kind, _TEXT)
        # To Python, a flag is a number.
        if not isinstance(value, types) or isinstance(value, bool) != (self.kind is bool):
            return False
        if self.kind in _NUMBERS:
            # Written so that NaN is outside every range.
            least, most = self.info.min, self.info.max
            return (least is None or value >= least) and (most is None or value <= most)
        # An empty path would mean the working directory.
        return self.kind is not Path or bool(value.strip())


@dataclass(frozen=True)
class Setting:
    """A value, and where it was given: ``kvrag.toml:3``."""

    value: Any
    origin: str


Settings = Mapping[str, Setting]


@dataclass(frozen=True)
class SettingsFile:
    """A settings file that was read and checked.

    Attributes
    ----------
    path
        The file's path.
    is_named
        Whether the user named it; otherwise it was found in the working directory.
    common, tables
        The settings for all commands by key, and those for each command: ``("bench", "ttft")``.
    """

    path: Path
    is_named: bool
    common: Settings
    tables: Mapping[tuple[str, ...], Settings]

    def of(self, place: tuple[str, ...], keys: Mapping[str, Key]) -> dict[str, Setting]:
        """Return the settings for a command, by key."""
        common = {name: one for name, one in self.common.items() if name in keys}
        return {**common, **self.tables.get(place, {})}


def keys_of(command: Any, function: Callable[..., Any]) -> dict[str, Key]:
    """Return a command's options by key, from its function's annotations."""
    hints = typing.get_type_hints(function, include_extras=True)
    keys = {}
    for parameter in command.params:
        annotation = hints.get(parameter.name)
        if parameter.param_type_name != "option" or annotation is None:
            continue
        given, info = typing.get_args(annotation)[:2]
        kinds = [one for one in (typing.get_args(given) or (given,)) if one is not type(None)]
        is_list = typing.get_origin(kinds[0]) is list
        name = max(parameter.opts, key=len).lstrip("-")
        keys[name] = Key(name, parameter, info, str if is_list else kinds[0], is_list)
    return keys


def check(keys: Mapping[str, Key], command: str, name: str, value: object, origin: str) -> Setting:
    """Return a setting for a command; raise ParameterError if the command does not accept it."""
    key = keys.get(name)
    if key is None:
        if gone := GONE.get((command, name)):
            raise ParameterError(f"{origin}: {name} {gone}")
        known = arguments.like(name, keys) or f"; it has {', '.join(sorted(keys))}"
        raise ParameterError(
            f"{origin}: 'kvrag {command}' has no option {arguments.shown(name)}{known}"
        )
    if not key.accepts(value):
        raise ParameterError(
            f"{origin}: {name}: expected {key.expected}, found {arguments.shown(value)}"
        )
    if key.info.parser is not None:
        try:
            key.info.parser(value)
        except typer.BadParameter as error:
            raise ParameterError(f"{origin}: {name}: {error.message}") from error
    return Setting(value, origin)


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
    lines = _lines(text)
    common: dict[str, Setting] = {}
    tables: dict[tuple[str, ...], dict[str, Setting]] = {}
    for keys_path, value, command in _entries(document, root, context, path, lines):
        *table, name = keys_path
        origin = _origin(path, lines, keys_path)
        key = None
        if command is None:
            if not isinstance(value, str) or not value.strip():
                raise ParameterError(
                    f"{origin}: {name}: expected text, found {arguments.shown(value)}"
                )
            setting = Setting(value, origin)
        elif GONE.get((" ".join(table), name)) is _COMPRESSION_GONE and value == "none":
            continue  # as it is always now
        else:
            setting = check(command.keys, " ".join(table), name, value, origin)
            key = command.keys[name]
        is_path = (name == "index" and not arguments.is_url(value)) or (
            key is not None and key.kind is Path
        )
        if is_path:
            # A path in the file is relative to the file, not to the working directory.
            whole = path.parent / arguments.path(value, f"{origin}: {name}")
            setting = Setting(str(arguments.path(whole, f"{origin}: {name}")), origin)
        if not is_named:
            _check_harmless(name, is_path, setting, path)
        (common if command is None else tables.setdefault(tuple(table), {}))[name] = setting
    return SettingsFile(path, is_named, common, tables)


def _entries(
    document: Mapping[str, Any],
    group: Any,
    context: Any,
    path: Path,
    lines: Mapping[tuple[str, ...], int],
    place: tuple[str, ...] = (),
) -> Iterator[tuple[tuple[str, ...], object, Any]]:
    """Yield each key with its tables, its value, and its command (None for all commands)."""
    for name, value in document.items():
        here = (*place, name)
        origin = functools.partial(_origin, path, lines, here)
        if not isinstance(value, dict):
            if place:
                raise ParameterError(
                    f"{origin()}: {' '.join(place)!r} is a group of commands: expected tables such "
                    f"as [{'.'.join(place)}.{group.list_commands(context)[0]}], found "
                    f"{arguments.shown(name)}"
                )
            if name not in COMMON:
                raise ParameterError(
                    f"{origin()}: {arguments.shown(name)} is no key for all "
                    f"commands{arguments.like(name, COMMON)}; "
                    f"expected {', '.join(COMMON)} outside tables; one command's option belongs in "
                    "its table, such as [query]"
                )
            yield here, value, None
            continue
        known = group.list_commands(context)
        if name not in known:
            if gone := getattr(group, "gone", {}).get(name):
                raise ParameterError(f"{origin()}: 'kvrag {' '.join(here)}' {gone}")
            raise ParameterError(
                f"{origin()}: there is no command 'kvrag {arguments.cut(' '.join(here))}'"
                f"{arguments.like(name, known)}; expected {', '.join(known)}"
            )
        command = group.get_command(context, name)
        if hasattr(command, "list_commands"):
            yield from _entries(value, command, context, path, lines, here)
        elif not hasattr(command, "keys"):
            # A placeholder for a command of another distribution.
            raise ParameterError(
                f"{origin()}: 'kvrag {arguments.cut(' '.join(here))}': {command.help}"
            )
        else:
            for key, setting in value.items():
                yield (*here, key), setting, command


def _text(path: Path) -> str:
    if str(path) == os.devnull:
        return ""  # the usual name for no settings
    try:
        text = read_regular(path, _MAX_BYTES).decode("utf-8-sig")  # some editors mark it so
    except OSError as error:
        is_dangling = path.is_symlink() and not path.exists()
        reason = "it is a link to nothing" if is_dangling else error.strerror
        raise ParameterError(
            f"{path} cannot be read: {reason}; name another with --config, or {os.devnull} for none"
        ) from error
    except UnicodeDecodeError as error:
        raise ParameterError(f"{path} is not UTF-8: {error}; save it as UTF-8") from error
    for number, line in enumerate(text.split("\n"), start=1):
        for found, most, what in (
            (len(line), _MAX_LINE, "characters"),
            (_QUOTED.sub("", line).partition("#")[0].count("."), _MAX_DOTS, "dots"),
        ):
            if found > most:
                raise ParameterError(
                    f"{path}:{number}: expected at most {most:,} {what} in a line, found "
                    f"{found:,}; spread them over several lines"
                )
    return text


def _lines(text: str) -> dict[tuple[str, ...], int]:
    """Return the line of each table and key, which `tomllib` does not report."""
    found: dict[tuple[str, ...], int] = {}
    table: tuple[str, ...] = ()
    for number, line in enumerate(text.split("\n"), start=1):
        said = line.strip()
        key, equals, _ = said.partition("=")
        if said.startswith("["):
            table = _parts(said.lstrip("[ \t").partition("]")[0])
            found.setdefault(table, number)
        elif equals and not said.startswith("#"):
            found.setdefault((*table, *_parts(key)), number)
    return found


def _parts(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in dotted.split("."))


def _origin(path: Path, lines: Mapping[tuple[str, ...], int], place: Sequence[str]) -> str:
    # A key in an inline table gets the table's line; a table of dotted keys gets the first key's.
    for length in range(len(place), 0, -1):
        if line := lines.get(tuple(place[:length])):
            return f"{path}:{line}"
    begin = tuple(place)
    first = next((line for one, line in lines.items() if one[: len(begin)] == begin), None)
    return str(path) if first is None else f"{path}:{first}"


def _check_harmless(name: str, is_path: bool, setting: Setting, path: Path) -> None:
    """Raise ParameterError for a setting that is allowed only in a file that the user named."""
    remedy = (
        f"{path} was found, not named: if you trust it, name it with --config {path}, or set "
        f"{VARIABLE} to its absolute path"
    )
    if name == "index":
        folder = path.absolute().parent.resolve()
        problem = f"expected a folder in {folder}"
        if is_path:
            problem = _foreign_index(Path(setting.value).resolve(), folder)
        if problem:
            raise ParameterError(
                f"{setting.origin}: index = {arguments.shown(setting.value)}: {problem}; {remedy}"
            )
    elif name not in HARMLESS or is_path:
        raise ParameterError(
            f"{setting.origin}: {arguments.shown(name)} can name a path, a model or code, or "
            "disable a check; "
            f"{remedy}"
        )


def _foreign_index(index: Path, folder: Path) -> str:
    """Return why an index leads outside a folder, or "" if it does not."""
    from kvrag.ingest import config

    if not index.is_relative_to(folder):
        return f"expected a folder in {folder}"
    if not (index / config.FILE_NAME).exists():
        return ""
    made = config.IndexConfig.load(index)
    if made.store:
        return f"its KV is elsewhere, in {made.store}"
    if Path(made.embedding).name != made.embedding:
        return f"its embedding is in {made.embedding}"
    return ""
