"""The outline of source code: where definitions and statements begin, and what they are called.

tree-sitter parses; its grammars agree on what a definition looks like (it has a name and a body),
so that one walk over the tree serves all languages.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from kvrag.chunk import Mark
from kvrag.ingest.limits import MAX_MARKS, MAX_MARKS_CHARACTERS, MAX_TITLE_CHARACTERS

if TYPE_CHECKING:
    from tree_sitter import Node

# Suffixes by the module of their grammar, and the function in it where that is not "language".
_LANGUAGES = {
    "python": ".py .pyi",
    "javascript": ".js .jsx .mjs .cjs",
    "typescript:language_typescript": ".ts .mts .cts",
    "typescript:language_tsx": ".tsx",
    "java": ".java",
    "c": ".c",
    "cpp": ".h .hh .hpp .hxx .cc .cpp .cxx",  # headers of C too
    "go": ".go",
    "rust": ".rs",
    "ruby": ".rb",
    "php:language_php": ".php",
    "c_sharp": ".cs",
    "bash": ".sh .bash",
}
_GRAMMARS = {one: name for name, suffixes in _LANGUAGES.items() for one in suffixes.split()}
CODE_SUFFIXES = frozenset(_GRAMMARS)
"""The suffixes of source code."""

# Nodes whose children are statements, members or entries of the same kind.
_BLOCKS = frozenset(
    {
        *("module", "program", "source_file", "translation_unit", "compilation_unit", "block"),
        *("statement_block", "compound_statement", "statement_list", "block_body", "then"),
        *("body_statement", "do_group", "class_body", "interface_body", "enum_body"),
        *("enum_body_declarations", "constructor_body", "annotation_type_body", "object"),
        *("declaration_list", "field_declaration_list", "enumerator_list", "enum_variant_list"),
        *("enum_member_declaration_list", "accessor_list", "switch_body", "switch_block"),
        *("match_block", "dictionary", "preproc_if", "preproc_ifdef", "preproc_else"),
        "preproc_elif",
    }
)
# Nodes that belong to what follows them.
_LEADING = frozenset(
    {"comment", "line_comment", "block_comment", "decorator", "attribute_item", "annotation"}
)
# Nodes around a definition, which is their last child.
_WRAPPERS = frozenset(
    {
        *("decorated_definition", "export_statement", "ambient_declaration", "type_declaration"),
        *("template_declaration", "lexical_declaration", "variable_declaration"),
        "expression_statement",
    }
)
# Fields in which definitions have their name, and what else than a body may have one.
_NAMES = ("name", "declarator", "property", "key", "left")
_VALUES = ("value", "right", "type")
_TYPES_OF_GO = ("struct_type", "interface_type")
_LOOP = re.compile("^for|_for_")  # has a body, and a variable that is not its name
_MAX_LEVEL = 11
# As many tokens as the shortest chunk has, if each were one character: shorter nodes stay whole.
_LEAST_CHARACTERS = 16
_NOT_ASCII = re.compile(r"[^\x00-\x7f]")


def is_installed(suffix: str) -> bool:
    """Return whether the grammar of a kind of source code is installed (``kvrag[code]``)."""
    names = ("tree_sitter", f"tree_sitter_{_GRAMMARS[suffix].partition(':')[0]}")
    return all(importlib.util.find_spec(name) is not None for name in names)


def outline(text: str, suffix: str) -> tuple[Mark, ...]:
    """Return the marks of source code in ascending order; only the first without its grammar.

    A mark's offset is that of the comments and decorators above what it marks. Its level is the
    number of blocks around it. Those of the innermost blocks are left out if there are too many.

    Parameters
    ----------
    text
        The code, normalised.
    suffix
        One of `CODE_SUFFIXES`.
    """
    first = Mark(0, 0, "")
    if not is_installed(suffix):
        return (first,)
    # One byte for each character: then offsets in bytes are those of the text. A letter is valid
    # in names, strings and comments.
    tree = _parser(suffix).parse(_NOT_ASCII.sub("x", text).encode())
    marks = sorted({first, *_marks(tree.root_node, text)})
    most = _MAX_LEVEL
    while len(marks) > MAX_MARKS or sum(len(mark.title) for mark in marks) > MAX_MARKS_CHARACTERS:
        most -= 1
        marks = [mark for mark in marks if mark.level <= most]
    return tuple(marks) or (first,)


@functools.cache
def _parser(suffix: str) -> Any:
    import tree_sitter

    name, _, function = _GRAMMARS[suffix].partition(":")
    grammar = importlib.import_module(f"tree_sitter_{name}")
    language = getattr(grammar, function or "language")()
    return tree_sitter.Parser(tree_sitter.Language(language))


def _marks(root: Node, text: str) -> Iterator[Mark]:
    waiting = [(root, 0)]
    while waiting:
        node, level = waiting.pop()
        children = node.named_children
        if node.type in _BLOCKS and level <= _MAX_LEVEL:
            yield from _marks_of_block(children, level, text)
            level += 1
        for child in children:
            if child.end_byte - child.start_byte >= _LEAST_CHARACTERS:
                waiting.append((child, level))


def _marks_of_block(children: list[Node], level: int, text: str) -> Iterator[Mark]:
    start: int | None = None  # of what leads the next child
    row = -1  # on which the child before ends
    is_first = True
    for child in children:
        first_row = child.start_point.row
        if start is not None and first_row > row + 1:  # an empty line between
            if not is_first:
                yield Mark(start, level, "")
            start, is_first = None, False
        if child.type in _LEADING:
            if start is None and (is_first or first_row > row):
                start = child.start_byte
        else:
            title = _title(child, text)
            # The first child stays with the head of its block, unless it has a name.
            if title or not is_first:
                yield Mark(child.start_byte if start is None else start, level, title)
            start, is_first = None, False
        row = child.end_point.row
    if start is not None and not is_first:
        yield Mark(start, level, "")


def _title(node: Node, text: str) -> str:
    """Return the name that a node defines, "" for one that is no definition."""
    while node.type in _WRAPPERS and node.named_child_count:
        node = node.named_children[-1]
    if _LOOP.search(node.type) or not _has_body(node):
        return ""
    if node.type == "impl_item":  # of Rust: a trait for a type
        first, last = map(node.child_by_field_name, ("trait", "type"))
        first = first or last
    else:
        first = last = _field(node, _NAMES)
        # In C a declarator is around the name, and may be around another declarator.
        while last is not None and last.type.endswith("declarator") and last.named_child_count:
            first = last = last.child_by_field_name("declarator") or last.named_children[-1]
    if first is None or last is None:
        return ""
    return " ".join(text[first.start_byte : last.end_byte].split())[:MAX_TITLE_CHARACTERS]


def _has_body(node: Node) -> bool:
    value = node if node.child_by_field_name("body") else _field(node, _VALUES)
    if value is None:
        return False
    return value.child_by_field_name("body") is not None or value.type in _TYPES_OF_GO


def _field(node: Node, names: Iterable[str]) -> Node | None:
    """Return the first of these fields that a node has."""
    return next(filter(None, map(node.child_by_field_name, names)), None)
