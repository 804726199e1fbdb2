"""The commands that README.md and docs/ print are parsed, and run by nobody: they may take hours.

A misspelt command, option or value fails, and so does a required option that is left out.
"""

import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.main import get_command

from kvrag.cli.main import app
from tests.test_doc_examples import PAGES, ROOT, blocks

# Its commands are in a table.
TABLE = "docs/results.md"
UsageError: Any = typer.BadParameter.__base__


def scripts(page: str) -> Iterator[str]:
    yield from blocks(page, "sh")
    if page == TABLE:
        yield from re.findall(r"`((?:[A-Z_]+=\S+ )*kvrag [^`]+)`", (ROOT / page).read_text("utf-8"))


def commands(script: str, name: str) -> Iterator[list[str]]:
    """Yield the arguments of each call of a program in a script of the shell."""
    # Text in quotes may have several lines; elsewhere a line's end is that of a command.
    text = script.replace("\\\n", "").replace("\n", "\n; ")
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    for is_separator, words in itertools.groupby(lexer, lambda word: set(word) <= set(";|&()<>")):
        rest = list(words)
        while rest and (rest[0] in ("do", "time") or re.fullmatch(r"\w+=.*", rest[0])):
            del rest[0]
        if rest[:2] == ["accelerate", "launch"]:
            rest = rest[rest.index("-m") + 1 :]
        if not is_separator and rest[:1] == [name]:
            yield rest[1:]


def calls(name: str) -> list[tuple[str, list[str]]]:
    return [
        (page, arguments)
        for page in PAGES
        for script in scripts(page)
        for arguments in commands(script, name)
    ]


CALLS = calls("kvrag")


def parse(arguments: list[str]) -> None:
    """Parse the arguments of `kvrag` as the program does, and stop before it runs."""
    name, command = "kvrag", get_command(app)
    context = None
    while hasattr(command, "list_commands"):
        context = typer.Context(command, info_name=name, parent=context)
        assert arguments, "no command"
        name, *arguments = arguments
        command = command.get_command(context, name)
        assert command is not None, f"no command {name!r}"
    command.make_context(name, arguments, parent=context)


@pytest.mark.parametrize("page", sorted({page for page, _ in CALLS}))
def test_printed_commands_are_valid(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments in (given for name, given in CALLS if name == page):
        parse(arguments)


def test_targets_of_make_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    named = {arguments[0] for _, arguments in calls("make")}
    for page in (*PAGES, "CONTRIBUTING.md"):
        named |= set(re.findall(r"`make ([\w-]+)", (ROOT / page).read_text("utf-8")))
    assert {"docs", "bench-regress"} <= named
    assert named <= targets
