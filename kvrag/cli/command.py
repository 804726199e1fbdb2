"""Commands that take options from `kvrag.toml`, and groups that import them when they run."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import re
import sys
import typing
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command, get_group

from kvrag import arguments
from kvrag.arguments import cut
from kvrag.cli import console
from kvrag.cli import settings as s
from kvrag.cli.console import EXIT_USAGE, guard, guarded

_FILE = "kvrag.file"
_POLICY = "policy"
_PARAMETERS = frozenset({"ratio", "boundary-tokens"})
# An option of 0.2.0.
_SET = "--set"


class Command(TyperCommand):
    """A command that also takes option values from `kvrag.toml`."""

    keys: Mapping[str, Any]

    # Typer's names for the types of contexts and commands differ between versions.
    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help, and where the options are that it leaves out."""
        num_more = sum(key.hidden for key in self.keys.values())
        if num_more:
            named = " ".join(_place(ctx))
            self.epilog = f"'kvrag config {named}' lists all options, {num_more} more than these."
        super().format_help(ctx, formatter)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line; settings replace the options' defaults."""
        self._refuse_gone(ctx, args)
        try:
            given, rest, _ = self.make_parser(ctx).parse_args(list(args))
        except Exception as error:  # Typer's own class, in a module that differs between versions
            if found := getattr(error, "possibilities", None):
                name: str = error.option_name  # type: ignore[attr-defined]
                short = [name[1:] for one in self.params if name[1:] in one.opts]
                error.possibilities = short or arguments.nearest(name, found)  # type: ignore[attr-defined]
            raise
        if rest and not ctx.allow_extra_args:
            ctx.fail(f"too many words: {cut(' '.join(rest))}; put a text of several in quotes")
        if not given.get("help") and not ctx.resilient_parsing:
            with guard():
                self._settle(ctx, given)
        return super().parse_args(ctx, args)

    def _refuse_gone(self, ctx: Any, args: list[str]) -> None:
        """Fail with what to give instead of an option of an earlier version."""
        place = " ".join(_place(ctx))
        for arg in itertools.takewhile(lambda arg: arg != "--", args):
            option = arg.partition("=")[0]
            if option == _SET:
                ctx.fail(
                    f"{_SET} KEY=VALUE is gone: give the option --KEY VALUE ('kvrag config "
                    f"{place}' lists all), or write KEY = VALUE below "
                    f"[{place.replace(' ', '.')}] in {s.FILE_NAME}"
                )
            if option.startswith("--") and (gone := s.GONE.get((place, option[2:]))):
                ctx.fail(f"{option} {gone}")

    def _settle(self, ctx: Any, given: Mapping[str, Any]) -> None:
        place = _place(ctx)
        named = given.get("config")
        root = ctx.find_root()
        file = s.read_file(None if named is None else Path(named), root.command, root)
        from_file = {} if file is None else file.of(place, self.keys)
        said = {
            name: given[key.name]
            for name, key in self.keys.items()
            if given.get(key.name) is not None
        }
        kept = _own_parameters(from_file, said, self.keys)
        ctx.default_map = {self.keys[name].name: value for name, value in kept.items()}
        ctx.meta[_FILE] = file
        used = [cut(f"{name}={value}") for name, value in sorted(kept.items()) if name not in said]
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
        The function to call. A parameter whose type is a dataclass stands for its fields.
    settings
        Arguments for `typer.Typer.command`.
    """
    flat = _flat(function)
    head = inspect.getdoc(function) or ""
    told = {"help": head.partition("\n\nParameters\n")[0], **settings}
    command = _as_command(name, guarded(flat), cls=Command, **told)
    assert isinstance(command, Command)
    # One line for each paragraph, since a terminal may be narrower than the source.
    command.help = "\n\n".join(
        " ".join(paragraph.split()) for paragraph in (command.help or "").split("\n\n")
    )
    (shared,) = _as_command("shared", _shared).params
    shared.expose_value = False
    command.params.append(shared)
    command.keys = s.keys_of(command)
    return command


def _flat(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with the fields of its groups of options as its own parameters.

    A parameter of the function's own stands for the field of its name, with another default. The
    help of an option is what the docstring says of it, unless its annotation has one.
    """
    declared = inspect.signature(function, eval_str=True).parameters
    groups = {
        one.name: one.annotation
        for one in declared.values()
        if isinstance(one.annotation, type) and is_dataclass(one.annotation)
    }
    found: dict[str, inspect.Parameter] = {}
    for one in declared.values():
        if one.name not in groups:
            kind = _with_help(one.annotation, _documented(function).get(one.name))
            found[one.name] = one.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=kind)
            continue
        hints = typing.get_type_hints(one.annotation, include_extras=True)
        docs = _documented(one.annotation)
        for field in fields(one.annotation):
            if field.name not in declared:
                found[field.name] = inspect.Parameter(
                    field.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=field.default,
                    annotation=_with_help(hints[field.name], docs.get(field.name)),
                )

    @functools.wraps(function)
    def flat(**given: Any) -> Any:
        own = {name: value for name, value in given.items() if name in declared}
        for name, group in groups.items():
            own[name] = group(**{field.name: given[field.name] for field in fields(group)})
        return function(**own)

    flat.__signature__ = inspect.Signature(list(found.values()))  # type: ignore[attr-defined]
    flat.__annotations__ = {name: one.annotation for name, one in found.items()}
    return flat


@functools.cache
def _documented(what: Any) -> dict[str, str]:
    """Return what a docstring says of each parameter or attribute."""
    found = re.findall(r"^(\w+)\n((?: {4}.*\n?)+)", inspect.getdoc(what) or "", re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


def _with_help(annotation: Any, text: str | None) -> Any:
    """Return an option's annotation with its help, unless it has one."""
    if text is None or typing.get_origin(annotation) is not Annotated:
        return annotation
    kind, info = typing.get_args(annotation)
    info = copy.copy(info)
    info.help = info.help or text
    return Annotated[kind, info]


def _shared(
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="FILE",
            help=f"Settings file. Default: the path in {s.VARIABLE}, or {s.FILE_NAME} here.",
        ),
    ] = None,
) -> None:
    """Define the option that every command has."""


def _as_command(name: str, function: Callable[..., Any], **settings: Any) -> Any:
    holder = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    holder.command(name, **settings)(function)
    return get_command(holder)


def _own_parameters(
    from_file: Mapping[str, Any], said: Mapping[str, Any], keys: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return a file's settings without parameters of another policy than the one in effect.

    The rule is that of `kvrag.engine.request.Recompute.over`.
    """
    is_another = _POLICY in said and said[_POLICY] != from_file.get(_POLICY, keys[_POLICY].default)
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
    """Return which options the command line gives, as written there: ``--seed``."""
    return [
        f"--{parameter.replace('_', '-')}"
        for parameter in parameters
        if (source := context.get_parameter_source(parameter)) and source.name == "COMMANDLINE"
    ]


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
    return _as_command(name, say, help=help_text, **settings)


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
