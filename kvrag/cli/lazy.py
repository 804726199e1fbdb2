"""Groups of commands that import a command's module only to run it or to show its help."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any, ClassVar

import typer
from typer.core import TyperGroup
from typer.main import get_command, get_group

from kvrag.cli.command import make_command
from kvrag.cli.failures import EXIT_USAGE

ADD_ONS = {"kvrag_bench": "bench", "kvrag_train": "train"}
"""Packages of other distributions, and the extras that install them."""


class LazyGroup(TyperGroup):
    """A group that knows only its commands' names; `lazy_group` sets the class attributes."""

    places: ClassVar[Mapping[str, str]]
    settings: ClassVar[Mapping[str, Mapping[str, Any]]]
    gone: ClassVar[Mapping[str, str]]

    # Typer's names for the types of contexts and commands differ between versions.
    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        # Names to list, and to suggest after a typing error; `get_command` returns the commands.
        self.commands: Any = {**dict.fromkeys(self.places), **self.commands}

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command, importing its module if needed; return None if there is none."""
        if cmd_name in self.gone:
            return _refusing(cmd_name, self.gone[cmd_name])
        place = self.places.get(cmd_name)
        if place is None:
            return super().get_command(ctx, cmd_name)
        module, _, name = place.partition(":")
        try:
            found = getattr(import_module(module if "." in module else f"kvrag.cli.{module}"), name)
        except ModuleNotFoundError as error:
            if error.name not in ADD_ONS:
                raise
            install = f"pip install 'kvrag[{ADD_ONS[error.name]}]'"
            # A bracket begins markup in help.
            shown = install.replace("[", r"\[")
            return _refusing(cmd_name, f"is not installed: {install}", f"Not installed: {shown}.")
        if isinstance(found, typer.Typer):
            return get_group(found)
        return make_command(cmd_name, found, self.settings.get(cmd_name, {}))


def _refusing(name: str, why: str, help_text: str = "") -> Any:
    """Return a command that only says why it does not run."""

    def say() -> None:
        print(f"error: 'kvrag {name}' {why}", file=sys.stderr)
        raise typer.Exit(EXIT_USAGE)

    anything = {"allow_extra_args": True, "ignore_unknown_options": True}
    settings: dict[str, Any] = {"add_help_option": False, "context_settings": anything}
    holder = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    holder.command(name, help=help_text, **settings)(say)
    return get_command(holder)


def lazy_group(
    places: Mapping[str, str],
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    gone: Mapping[str, str] | None = None,
) -> type[LazyGroup]:
    """Return a group class for `typer.Typer(cls=...)`.

    Parameters
    ----------
    places
        The ``module:name`` of each command's function or `typer.Typer`, by command name; a
        module without a dot is below `kvrag.cli`.
    settings
        Arguments for `typer.Typer.command`, by command name.
    gone
        What replaces each command of an earlier version; help does not list these.
    """
    attributes = {"places": places, "settings": settings or {}, "gone": gone or {}}
    return type("Commands", (LazyGroup,), attributes)
