"""What docs say of the commands, from the commands themselves.

``python -m tools.commands`` writes the tables of `docs/cli.md`. The site's page of all options is
made while the site is built (`docs/conf.py`): sphinx-click knows Click's classes, and Typer has its
own copies of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import typer
from typer.main import get_command

from kvrag.cli.command import PANEL, Command
from kvrag.cli.main import app
from kvrag.cli.options import RESEARCH
from kvrag.cli.settings import HARMLESS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "cli.md"
# Their keys are explained by `kvrag config bench ttft` alone: who measures has a terminal.
_APART = ("bench", "train")


def commands(apart: Iterable[str] = _APART) -> Iterator[tuple[str, Command]]:
    """Yield the commands but those of some groups, each with its whole name."""
    root = get_command(app)
    yield from _below(root, typer.Context(root), "", frozenset(apart))


def _below(
    group: Any, context: Any, before: str, apart: frozenset[str]
) -> Iterator[tuple[str, Command]]:
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, Command):
            yield f"{before}{name}", command
        elif name not in apart:
            yield from _below(command, context, f"{before}{name} ", apart)


def reference() -> str:
    """Return every command with all its arguments, options and keys of ``--set``, as Markdown."""
    parts = []
    shared: list[tuple[str, ...]] = []
    for name, command in commands(apart=()):
        context = typer.Context(command)
        usage = " ".join(["kvrag", name, *command.collect_usage_pieces(context)])
        parts.append(f"## `kvrag {name}`\n\n{_plain(command.help or '')}\n\n```text\n{usage}\n```")
        panels: dict[str, list[tuple[str, ...]]] = {}
        for parameter in command.get_params(context):
            record = parameter.get_help_record(context)
            if record is not None:
                panel = parameter.rich_help_panel or "Arguments"
                panels.setdefault(panel, []).append((f"`{record[0]}`", _plain(record[1])))
        shared = panels.pop(PANEL)
        keys = [
            (f"`{key.name}`", _default(key.default), _plain(key.text))
            for key in command.keys.values()
            if key.panel == RESEARCH
        ]
        parts += [
            f"**{panel}**\n\n{_table(('name', 'is'), rows)}" for panel, rows in panels.items()
        ]
        if keys:
            parts.append(f"**Keys of `--set`**\n\n{_table(('name', 'default', 'is'), keys)}")
    return "\n\n".join(["Every command has:", _table(("name", "is"), shared), *parts, ""])


def _plain(text: str) -> str:
    """Return Markdown that shows a text of ``--help`` as a terminal does."""
    return re.sub(r"([`*_<\[\]])", r"\\\1", text.replace("\\[", "["))


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
