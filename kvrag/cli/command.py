"""Commands whose options can also be given as settings, some of them only as settings."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand
from typer.main import get_command

from kvrag import similar
from kvrag.arguments import cut
from kvrag.cli import console
from kvrag.cli import settings as s
from kvrag.cli.failures import guard, guarded
from kvrag.cli.options import RESEARCH

PANEL = "Settings"
_FILE = "kvrag.file"
_FOUND = "kvrag.settings"
_POLICY = "policy"
_PARAMETERS = frozenset({"ratio", "boundary-tokens"})


class Command(TyperCommand):
    """A command that also takes option values from `kvrag.toml` and from ``--set``."""

    keys: Mapping[str, s.Key]

    # Typer's names for the types of contexts and commands differ between versions.
    def get_params(self, ctx: Any) -> Any:
        """Return the parameters, with ``--help`` in the panel of the shared options."""
        params = super().get_params(ctx)
        params[-1].rich_help_panel = PANEL  # type: ignore[attr-defined]
        return params

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help, followed by the keys that are settings only."""
        more = sorted(key.name for key in self.keys.values() if key.panel == RESEARCH)
        if more:
            named = " ".join(_place(ctx))
            self.epilog = (
                f"Keys of {s.SET}: {', '.join(more)}. 'kvrag config {named}' explains them."
            )
        super().format_help(ctx, formatter)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line; settings replace the options' defaults."""
        self._tell_settings(ctx, args)
        try:
            given, _, _ = self.make_parser(ctx).parse_args(list(args))
        except Exception as error:  # Typer's own class, in a module that differs between versions
            if found := getattr(error, "possibilities", None):
                error.possibilities = similar.nearest(error.option_name, found)  # type: ignore[attr-defined]
            raise
        if not given.get("help") and not ctx.resilient_parsing:
            with guard():
                self._settle(ctx, given)
        return super().parse_args(ctx, args)

    def _tell_settings(self, ctx: Any, args: list[str]) -> None:
        """Fail with the right spelling if a setting is written as an option."""
        for arg in args:
            if arg == "--":
                break
            key = self.keys.get(arg.partition("=")[0].removeprefix("--"))
            if key is not None and key.panel == RESEARCH and arg.startswith("--"):
                ctx.fail(f"--{key.name} is a setting: give {s.SET} {key.name}=VALUE")

    def _settle(self, ctx: Any, given: Mapping[str, Any]) -> None:
        place = _place(ctx)
        named = given.get("config")
        root = ctx.find_root()
        file = s.read_file(None if named is None else Path(named), root.command, root)
        pairs = s.from_pairs(given.get("set") or (), self.keys, f"'kvrag {' '.join(place)}'")
        from_file = {} if file is None else file.of(place, self.keys)
        options = {
            name: given[key.parameter]
            for name, key in self.keys.items()
            if given.get(key.parameter) is not None
        }
        said = {name: one.value for name, one in pairs.items()} | options
        kept = _own_parameters(from_file, said, self.keys)
        found = {**kept, **pairs}
        ctx.default_map = {self.keys[name].parameter: one.value for name, one in found.items()}
        ctx.meta[_FILE] = file
        ctx.meta[_FOUND] = {self.keys[name].parameter: one for name, one in found.items()}
        used = [
            cut(f"{name}={one.value}") for name, one in sorted(kept.items()) if name not in said
        ]
        if file is not None and not file.is_named and used:
            # The user did not name this file, so report what it sets.
            line = " ".join(f"{file.path}: {', '.join(used)}".split())
            print(console.harmless(line), file=sys.stderr)


def make_command(name: str, function: Callable[..., Any], settings: Mapping[str, Any]) -> Command:
    """Return the command that calls a function.

    Parameters
    ----------
    name
        The command's name.
    function
        The function to call. Its options in panel `RESEARCH` are settings only: ``--help`` lists
        just their names, below the other options.
    settings
        Arguments for `typer.Typer.command`.
    """
    command = _as_command(name, guarded(function), cls=Command, **settings)
    assert isinstance(command, Command)
    # One line for each paragraph, since a terminal may be narrower than the source.
    command.help = "\n\n".join(
        " ".join(paragraph.split()) for paragraph in (command.help or "").split("\n\n")
    )
    command.keys = s.keys_of(command, function)
    by_parameter = {key.parameter: key for key in command.keys.values()}
    for parameter in command.params:
        key = by_parameter.get(parameter.name or "")
        if key is not None:
            _put_into_panel(parameter, key.panel)
    for shared in _as_command("shared", _shared).params:
        shared.expose_value = False
        _put_into_panel(shared, PANEL)
        command.params.append(shared)
    return command


def _shared(
    set: Annotated[
        list[str] | None,
        typer.Option(
            s.SET,
            metavar="KEY=VALUE",
            help="Set an option by its name, or a key listed below; repeatable.",
            show_default=False,
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="FILE",
            help=f"Settings file. Default: the path in {s.VARIABLE}, or {s.FILE_NAME} here.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Define the options that every command has."""


def _as_command(name: str, function: Callable[..., Any], **settings: Any) -> Any:
    holder = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    holder.command(name, **settings)(function)
    return get_command(holder)


def _put_into_panel(parameter: Any, panel: str) -> None:
    parameter.rich_help_panel = panel
    if panel == RESEARCH:
        parameter.hidden = True
        parameter.add_to_parser = lambda *_: None


def _own_parameters(
    from_file: s.Settings, said: Mapping[str, Any], keys: Mapping[str, s.Key]
) -> s.Settings:
    """Return a file's settings without parameters of another policy than the one in effect.

    The rule is that of `kvrag.engine.request.Recompute.over`. The options of the command line and
    those of ``--set`` count as one source (`said`), since ``--set`` alone gives some parameters.
    """
    in_file = from_file.get(_POLICY)
    is_another = _POLICY in said and said[_POLICY] != (
        keys[_POLICY].default if in_file is None else in_file.value
    )
    if is_another or not _PARAMETERS.isdisjoint(said):
        return {name: one for name, one in from_file.items() if name not in _PARAMETERS}
    return from_file


def _place(ctx: Any) -> tuple[str, ...]:
    """Return a command's name, preceded by the names of its groups."""
    return () if ctx.parent is None else (*_place(ctx.parent), ctx.info_name)


def settings_file(context: typer.Context) -> s.SettingsFile | None:
    """Return the settings file that was read for this command."""
    found: s.SettingsFile | None = context.meta.get(_FILE)
    return found


def given(context: typer.Context, *parameters: str) -> list[str]:
    """Return which ones the command line gives, as written there: ``--k``, ``--set seed=1``."""
    found = []
    for parameter in parameters:
        source = context.get_parameter_source(parameter)
        setting = context.meta.get(_FOUND, {}).get(parameter)
        if source is not None and source.name == "COMMANDLINE":
            found.append(f"--{parameter.replace('_', '-')}")
        elif setting is not None and setting.origin.startswith(s.SET):
            found.append(setting.origin)
    return found
