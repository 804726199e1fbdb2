"""Groups of commands that import a command's module only when it is called or described."""

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
"""Packages that other distributions bring, and the extras that install them."""


class LazyGroup(TyperGroup):
    """A group that knows its commands by name; the values come from `lazy_group`."""

    places: ClassVar[Mapping[str, str]]
    settings: ClassVar[Mapping[str, Mapping[str, Any]]]

    # Typer names the types of contexts and commands differently from version to version.
    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        # Listed, and suggested for a typing error; `get_command` says what they are.
        self.commands: Any = {**dict.fromkeys(self.places), **self.commands}

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command, imported now if it was not yet; None when there is none."""
        place = self.places.get(cmd_name)
        if place is None:
            return super().get_command(ctx, cmd_name)
        module, _, name = place.partition(":")
        try:
            found = getattr(import_module(module if "." in module else f"kvrag.cli.{module}"), name)
        except ModuleNotFoundError as error:
            if error.name not in ADD_ONS:
                raise
            return _absent(cmd_name, ADD_ONS[error.name])
        if isinstance(found, typer.Typer):
            return get_group(found)
        return make_command(cmd_name, found, self.settings.get(cmd_name, {}))


def _absent(name: str, extra: str) -> Any:
    """Return what stands for a command whose package is not installed, and says so."""
    install = f"pip install 'kvrag[{extra}]'"

    def say() -> None:
        print(f"error: 'kvrag {name}' is not installed: {install}", file=sys.stderr)
        raise typer.Exit(EXIT_USAGE)

    anything = {"allow_extra_args": True, "ignore_unknown_options": True}
    settings: dict[str, Any] = {"add_help_option": False, "context_settings": anything}
    # A bracket begins markup in help.
    shown = install.replace("[", r"\[")
    holder = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    holder.command(name, help=f"Not installed: {shown}.", **settings)(say)
    return get_command(holder)


def lazy_group(
    places: Mapping[str, str], settings: Mapping[str, Mapping[str, Any]] | None = None
) -> type[LazyGroup]:
    """Return a class of groups for `typer.Typer(cls=...)`.

    Parameters
    ----------
    places
        For each command's name the ``module:name`` of its function, or of its `typer.Typer`; a
        module without a dot is below `kvrag.cli`.
    settings
        For a command's name what `typer.Typer.command` is to be told of it.
    """
    return type("Commands", (LazyGroup,), {"places": places, "settings": settings or {}})
