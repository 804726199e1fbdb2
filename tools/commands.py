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

from kvrag.cli.command import Command
from kvrag.cli.main import app
from kvrag.cli.settings import HARMLESS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "cli.md"
# Their keys are explained by `kvrag config bench ttft` alone: who measures has a terminal.
_APART = ("bench", "train")
# The page says them once.
_SHARED = ("--config FILE", "-h, --help", "--help")


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
    """Return every command with all its arguments and options, as Markdown."""
    parts = []
    for name, command in commands(apart=()):
        context = typer.Context(command)
        usage = " ".join(["kvrag", name, *command.collect_usage_pieces(context)])
        parts.append(f"## `kvrag {name}`\n\n{_plain(command.help or '')}\n\n```text\n{usage}\n```")
        rows, more = [], []
        for parameter in command.get_params(context):
            is_hidden, parameter.hidden = getattr(parameter, "hidden", False), False
            record = parameter.get_help_record(context)
            parameter.hidden = is_hidden
            if record is not None and record[0] not in _SHARED:
                (more if is_hidden else rows).append((f"`{record[0]}`", _plain(record[1])))
        parts.append(_table(("name", "is"), rows))
        if more:
            parts.append(f"**Not in `--help`**\n\n{_table(('name', 'is'), more)}")
    return "\n\n".join(["Every command also has `--config FILE` and `--help`.", *parts, ""])


def _plain(text: str) -> str:
    """Return Markdown that shows a text of ``--help`` as a terminal does."""
    return re.sub(r"([`*_<\[\]])", r"\\\1", text.replace("\\[", "["))


def tables() -> dict[str, str]:
    """Return the tables by the name that their place in the page has."""
    return {
        "harmless": ", ".join(f"`{name}`" for name in sorted(HARMLESS)) + ".",
        "commands": _table(
            ("command", "does"),
            [(f"`{name}`", _first_sentence(command.help or "")) for name, command in commands()],
        ),
    }


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
