"""`kvrag config`: show the settings in use, and where each was given."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvrag import arguments
from kvrag.cli import console
from kvrag.cli import options as o
from kvrag.cli.command import Command, settings_file
from kvrag.errors import ParameterError

if TYPE_CHECKING:
    from kvrag.cli.settings import Key, Setting, SettingsFile


def config(
    context: typer.Context,
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="COMMAND",
            help="Command to describe, such as 'query' or 'pml run': shows all its options, also "
            "those that --help omits.",
        ),
    ] = None,
    as_json: o.JsonOption = False,
) -> None:
    """Show the settings file in use; with a COMMAND, show everything that can be set for it."""
    file = settings_file(context)
    if command:
        keys = _keys(context, command)
        given = {} if file is None else file.of(tuple(command), keys)
        rows = [_row(key, given.get(name)) for name, key in keys.items()]
    else:
        rows = _rows(file)
    if as_json:
        console.print_json({"file": None if file is None else _whole(file.path), "settings": rows})
        return
    if command:
        _print(rows)
    elif file is None:
        console.note(
            "no kvrag.toml is in this folder, and neither --config nor KVRAG_CONFIG is given"
        )
    else:
        console.write(f"{console.harmless(_whole(file.path))}\n")
        for row in rows:
            place = " ".join([*row["command"].split(), row["key"]])
            console.stream(f"  {row['from']}: {place} = {_shown(row['value'])}\n")


def _keys(context: typer.Context, command: list[str]) -> dict[str, Key]:
    root: Any = context.find_root()
    found = root.command
    for number, name in enumerate(command):
        known = found.list_commands(root) if hasattr(found, "list_commands") else []
        if name not in known:
            if gone := getattr(found, "gone", {}).get(name):
                raise ParameterError(f"'kvrag {' '.join(command[: number + 1])}' {gone}")
            raise ParameterError(
                f"there is no command 'kvrag {' '.join(command[: number + 1])}'"
                f"{arguments.like(name, known)}"
                + (f"; expected {', '.join(known)}" if known else "")
            )
        found = found.get_command(root, name)
    if not isinstance(found, Command):
        raise ParameterError(
            f"'kvrag {' '.join(command)}' is a group of commands: add one of "
            + ", ".join(found.list_commands(root))
        )
    return dict(found.keys)


def _row(key: Key, given: Setting | None) -> dict[str, Any]:
    return {
        "key": key.name,
        "value": key.parameter.default if given is None else given.value,
        "from": "default" if given is None else given.origin,
        "is_hidden": key.info.hidden,
        "help": (key.info.help or "").replace("\\[", "["),
    }


def _rows(file: SettingsFile | None) -> list[dict[str, Any]]:
    """Return every setting in a file, starting with those for all commands."""
    if file is None:
        return []
    return [
        {"command": " ".join(place), "key": name, "value": one.value, "from": one.origin}
        for place, settings in [((), file.common), *file.tables.items()]
        for name, one in settings.items()
    ]


def _print(rows: list[dict[str, Any]]) -> None:
    from rich.padding import Padding
    from rich.text import Text

    out = console.out()
    # Those of --help first.
    for row in sorted(rows, key=lambda row: row["is_hidden"]):
        said = f"{row['key']} = {_shown(row['value'])}"
        out.print(Text(console.harmless(said), style="bold"), Text(f"({row['from']})"))
        out.print(Padding(Text(console.harmless(row["help"])), (0, 0, 0, 4)))


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return "" if value is None else str(value)


def _whole(path: Path) -> str:
    return str(path.absolute())
