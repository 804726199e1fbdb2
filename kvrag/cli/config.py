"""`kvrag config`: show the settings in use, and where each was given."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvrag.cli import console
from kvrag.cli import options as o
from kvrag.cli.command import settings_file
from kvrag.cli.settings import command_of
from kvrag.errors import ParameterError


def config(
    context: typer.Context,
    command: Annotated[list[str] | None, typer.Argument(metavar="COMMAND")] = None,
    as_json: o.JsonOption = False,
) -> None:
    """Show the settings file in use; with a COMMAND, show everything that can be set for it.

    Parameters
    ----------
    command
        Command to describe, such as 'query' or 'pml run': shows all its options, also those that
        --help omits.
    """
    file = settings_file(context)
    path = None if file is None else str(file.path.absolute())
    rows: list[dict[str, Any]] = []
    if command:
        keys = _keys(context, tuple(command))
        given = {} if file is None else file.of(tuple(command), keys)
        for name, option in keys.items():
            rows.append(
                {
                    "key": name,
                    "value": given.get(name, option.default),
                    "from": str(file.path) if file is not None and name in given else "default",
                    "is_hidden": option.hidden,
                    "help": (option.help or "").replace("\\[", "["),
                }
            )
    elif file is not None:
        for place, settings in file.tables.items():
            said = {"command": " ".join(place), "from": str(file.path)}
            rows += [{**said, "key": name, "value": one} for name, one in settings.items()]
    if as_json:
        console.print_json({"file": path, "settings": rows})
    elif command:
        _print(rows)
    elif path is None:
        console.note(
            "no kvrag.toml is in this folder, and neither --config nor KVRAG_CONFIG is given"
        )
    else:
        console.stream(f"{path}\n")
        for row in rows:
            key = f"{row['command']} {row['key']}".strip()
            console.stream(f"  {key} = {_shown(row['value'])}\n")


def _keys(context: typer.Context, place: tuple[str, ...]) -> dict[str, Any]:
    root: Any = context.find_root()
    found = command_of(place, root.command, root)
    if hasattr(found, "keys"):
        return dict(found.keys)
    if not hasattr(found, "list_commands"):  # of an earlier version, or of another distribution
        raise ParameterError(f"'kvrag {' '.join(place)}': {found.help}")
    raise ParameterError(
        f"'kvrag {' '.join(place)}' is a group of commands: add one of "
        + ", ".join(found.list_commands(root))
    )


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
