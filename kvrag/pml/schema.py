"""The parts of a schema, and where in a file they are.

Source: Gim et al., Prompt Cache (arXiv 2311.04934) §3.2: text and modules, unions of modules that
exclude each other, parameters of a reserved length, the roles of a conversation. §3.3: scaffolds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from kvrag.errors import PMLError

Path = tuple[str, ...]
"""The names of the modules around a module, then its own name; () is the schema itself."""


@dataclass(frozen=True)
class Location:
    """A location in a file of markup or a program.

    Attributes
    ----------
    file
        The file, as the caller named it.
    line, column
        Both counted from 1.
    """

    file: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"

    def error(self, problem: str, remedy: str) -> PMLError:
        """Return an error about a problem at this place."""
        return PMLError(f"{self}: {problem}; {remedy}", self.file, self.line, self.column)


@dataclass(frozen=True)
class Text:
    """Text, with its outer white space settled. `is_document` marks text of a file (``src``)."""

    text: str
    location: Location
    is_document: bool = False


@dataclass(frozen=True)
class Parameter:
    """Room for text that a prompt gives.

    Attributes
    ----------
    name
        Unique in its module.
    length
        Tokens of the room.
    scaffold
        The text for prompts that give none; "" means placeholders.
    """

    name: str
    length: int
    scaffold: str
    location: Location


@dataclass(frozen=True)
class Module:
    """A part of a schema that a prompt may import by name.

    Attributes
    ----------
    name
        The name. An anonymous module, "", is included whenever the module around it is.
    is_cached
        Whether its text is encoded once and stored. Otherwise every prompt computes it.
    """

    name: str
    children: tuple[Node, ...]
    location: Location
    is_cached: bool = True


@dataclass(frozen=True)
class Union:
    """Modules that exclude each other: a prompt imports at most one.

    Attributes
    ----------
    members
        The modules, at least one.
    scaffold
        The member that represents the union in the schema's scaffold, or "".
    """

    members: tuple[Module, ...]
    scaffold: str
    location: Location


@dataclass(frozen=True)
class Turn:
    """One turn of the conversation. Turns are not nested.

    Attributes
    ----------
    role
        ``"system"``, ``"user"`` or ``"assistant"``.
    """

    role: str
    children: tuple[Node, ...]
    location: Location


Node = Text | Parameter | Module | Union | Turn


@dataclass(frozen=True)
class Scaffold:
    """Modules that are also encoded together, for prompts that import all of them.

    Attributes
    ----------
    paths
        The modules, two or more, in the schema's order.
    """

    paths: tuple[Path, ...]
    location: Location


@dataclass(frozen=True)
class Schema:
    """A parsed schema, fully checked."""

    name: str
    children: tuple[Node, ...]
    scaffolds: tuple[Scaffold, ...]
    location: Location

    @cached_property
    def modules(self) -> dict[Path, Module]:
        """All modules by path, in the order of the file."""
        return dict(_modules(self.children, ()))

    @cached_property
    def exclusions(self) -> dict[Path, int]:
        """The number of the union of each module that is a member of one."""
        numbers: dict[Path, int] = {}
        for number, (path, union) in enumerate(_unions(self.children, ())):
            for member in union.members:
                numbers[(*path, member.name)] = number
        return numbers

    @property
    def has_turns(self) -> bool:
        """Whether the schema is a conversation."""
        return any(True for _ in turns(self.children))

    def parameters(self, path: Path) -> dict[str, Parameter]:
        """Return the parameters of one module, without those of modules in it."""
        children = self.modules[path].children if path else self.children
        return {part.name: part for part in flat(children) if isinstance(part, Parameter)}


def flat(children: tuple[Node, ...]) -> Iterator[Node]:
    """Yield nodes in order, with turns and anonymous modules replaced by their contents."""
    for node in children:
        if isinstance(node, Turn) or (isinstance(node, Module) and not node.name):
            yield from flat(node.children)
        else:
            yield node


def turns(children: tuple[Node, ...], path: Path = ()) -> Iterator[tuple[Path, Turn]]:
    """Yield all turns in order, each with the path of its module."""
    for node in children:
        if isinstance(node, Turn):
            yield path, node
        elif isinstance(node, Module):
            yield from turns(node.children, (*path, node.name) if node.name else path)
        elif isinstance(node, Union):
            yield from turns(node.members, path)


def _modules(children: tuple[Node, ...], path: Path) -> Iterator[tuple[Path, Module]]:
    for node in flat(children):
        for module in node.members if isinstance(node, Union) else (node,):
            if isinstance(module, Module):
                inner = (*path, module.name)
                yield inner, module
                yield from _modules(module.children, inner)


def _unions(children: tuple[Node, ...], path: Path) -> Iterator[tuple[Path, Union]]:
    for node in flat(children):
        if isinstance(node, Union):
            yield path, node
        for module in node.members if isinstance(node, Union) else (node,):
            if isinstance(module, Module):
                yield from _unions(module.children, (*path, module.name))
