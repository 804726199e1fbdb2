"""Makes names of modules from a program's conditions."""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace

from kvrag.pml.elements import normalise
from kvrag.pml.parser import RESERVED
from kvrag.pml.schema import Module, Node, Union


def as_name(words: str) -> str:
    """Return a module's name made from a program's words; the same words give the same name."""
    words = normalise(words)
    name = re.sub(r"[^a-zA-Z0-9_.]+", "-", words).strip("-.")
    if name and name != words and not re.fullmatch(r"[\w.\s'\"-]*", words, re.ASCII):
        # Signs were dropped: 'a < b' and 'a > b' must get different names.
        name += "-" + hashlib.blake2b(words.encode(), digest_size=3).hexdigest()
    is_free = (name[:1].isalpha() or name[:1] == "_") and name not in RESERVED
    return name if is_free else f"_{name}"


def renamed(node: Node, used: dict[str, int]) -> Node:
    """Number sibling modules that would share a name."""
    if isinstance(node, Union):
        return replace(node, members=tuple(numbered(one, used) for one in node.members))
    return numbered(node, used) if isinstance(node, Module) else node


def numbered(module: Module, used: dict[str, int]) -> Module:
    """Return a module with a name that is not counted in `used` yet."""
    count = used[module.name] = used.get(module.name, 0) + 1
    return module if count == 1 else replace(module, name=f"{module.name}-{count}")
