"""Write the tables of docs/cli.md from the commands themselves: ``python -m tools.commands``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from typer.main import get_command

from kvrag.cli.command import Command
from kvrag.cli.main import app
from kvrag.cli.options import RESEARCH
from kvrag.cli.settings import HARMLESS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "cli.md"
# Their keys are explained by `kvrag config bench ttft` alone: who measures has a terminal.
_APART = ("bench", "train")


def commands() -> Iterator[tuple[str, Command]]:
    """Yield the commands but those of `bench` and `train`, each with its whole name."""
    root = get_command(app)
    yield from _below(root, typer.Context(root), "")


def _below(group: Any, context: Any, before: str) -> Iterator[tuple[str, Command]]:
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, Command):
            yield f"{before}{name}", command
        elif name not in _APART:
            yield from _below(command, context, f"{before}{name} ")


def tables() -> dict[str, str]:
    """Return the tables by the name that their place in the page has."""
    keys = [
        (name, key)
        for name, command in commands()
        for key in command.keys.values()
        if key.panel == RESEARCH
    ]
    return {
        "harmless": ", ".join(f"`{name}`" for name in sorted(HARMLESS)) + ".",
        "commands": _table(
            ("command", "does"),
            [(f"`{name}`", _first_sentence(command.help or "")) for name, command in commands()],
        ),
        "keys": _table(
            ("key", "commands", "default", "is"),
            [
                (
                    f"`{key.name}`",
                    ", ".join(other for other, one in keys if _same(one, key)),
                    _default(key.default),
                    key.text,
                )
                for number, (_, key) in enumerate(keys)
                if not any(_same(one, key) for _, one in keys[:number])
            ],
        ),
    }


def _same(one: Any, other: Any) -> bool:
    return (one.name, one.default, one.text) == (other.name, other.default, other.text)


def _default(value: object) -> str:
    if value is None:
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=\.)\s", " ".join(text.split()))[0]


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
    )


def written(page: str) -> str:
    """Return a page with its tables written anew."""
    for name, table in tables().items():
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        head, _, rest = page.partition(begin)
        _, _, tail = rest.partition(end)
        page = f"{head}{begin}\n{table}\n{end}{tail}"
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
