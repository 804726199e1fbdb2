"""Groups of commands that import a command's module only when it is called or described."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, ClassVar

from typer.core import TyperGroup

from kvrag.cli.command import make_command


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
        module, _, function = place.partition(":")
        callback = getattr(import_module(f"kvrag.cli.{module}"), function)
        return make_command(cmd_name, callback, self.settings.get(cmd_name, {}))


def lazy_group(
    places: Mapping[str, str], settings: Mapping[str, Mapping[str, Any]] | None = None
) -> type[LazyGroup]:
    """Return a class of groups for `typer.Typer(cls=...)`.

    Parameters
    ----------
    places
        For each command's name its ``module:function`` below `kvrag.cli`.
    settings
        For a command's name, arguments of `typer.Typer.command`.
    """
    return type("Commands", (LazyGroup,), {"places": places, "settings": settings or {}})
