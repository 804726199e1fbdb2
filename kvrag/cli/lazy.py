"""Groups of commands that import a command's module only to run it or to show its help."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, ClassVar

from typer.core import TyperGroup

from kvrag.cli.command import make_command


class LazyGroup(TyperGroup):
    """A group that knows only its commands' names; `lazy_group` sets the class attributes."""

    places: ClassVar[Mapping[str, str]]
    settings: ClassVar[Mapping[str, Mapping[str, Any]]]

    # Typer's names for the types of contexts and commands differ between versions.
    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        # Names to list, and to suggest after a typing error; `get_command` returns the commands.
        self.commands: Any = {**dict.fromkeys(self.places), **self.commands}

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command, importing its module if needed; return None if there is none."""
        place = self.places.get(cmd_name)
        if place is None:
            return super().get_command(ctx, cmd_name)
        module, _, function = place.partition(":")
        callback = getattr(import_module(f"kvrag.cli.{module}"), function)
        return make_command(cmd_name, callback, self.settings.get(cmd_name, {}))


def lazy_group(
    places: Mapping[str, str], settings: Mapping[str, Mapping[str, Any]] | None = None
) -> type[LazyGroup]:
    """Return a group class for `typer.Typer(cls=...)`.

    Parameters
    ----------
    places
        The ``module:function`` below `kvrag.cli`, by command name.
    settings
        Arguments for `typer.Typer.command`, by command name.
    """
    return type("Commands", (LazyGroup,), {"places": places, "settings": settings or {}})
