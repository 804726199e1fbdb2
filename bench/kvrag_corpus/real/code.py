"""Code: a function that one chunk defines and another calls."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from kvrag_corpus.real.asked import Asked, draw_choices
from kvrag_corpus.real.words import ANIMALS, COLOURS, INSTRUMENTS, MATERIALS, PETS, TOWNS

_THINGS = ("box", "boat", "crate", "locker", "parcel", "room", "seat", "shelf", "ticket", "tray")
_KINDS = {
    "colour": COLOURS,
    "animal": ANIMALS,
    "material": MATERIALS,
    "instrument": INSTRUMENTS,
    "town": tuple(town.lower() for town in TOWNS),
    "label": tuple(pet.lower() for pet in PETS),
}
_NUM_MODULES = 4


def code(seed: int) -> Iterator[Asked]:
    """Yield questions for what a function returns that calls a function of another chunk.

    Four modules define a function each, and four others call them.
    """
    rng = Random(f"code {seed}")
    while True:
        kind = rng.choice([*_KINDS])
        things = rng.sample(_THINGS, _NUM_MODULES)
        values = rng.sample(_KINDS[kind], _NUM_MODULES)
        chunks = []
        for thing, value in zip(things, values, strict=True):
            chunks += [_defines(thing, kind, value), _calls(thing, kind)]
        place = rng.randrange(_NUM_MODULES)
        order = rng.sample(range(len(chunks)), len(chunks))
        yield Asked(
            question=f"What does print_{things[place]}() return?",
            answers=(values[place],),
            chunks=tuple(chunks[number] for number in order),
            supporting=tuple(sorted(order.index(2 * place + i) for i in range(2))),
            choices=draw_choices(values[place], values, (), rng),
        )


def _defines(thing: str, kind: str, value: str) -> str:
    return (
        f"# The file {kind}_of_{thing}.py\n\n\n"
        f"def {kind}_of_{thing}() -> str:\n"
        f'    """Return the {kind} of the {thing}.\n\n'
        f"    The {kind} is fixed. It stands here and nowhere else, so that it can be\n"
        f"    changed in one place when the owner wants another one.\n"
        f'    """\n'
        f'    return "{value}"'
    )


def _calls(thing: str, kind: str) -> str:
    return (
        f"# The file print_{thing}.py\n\nfrom {kind}_of_{thing} import {kind}_of_{thing}\n\n\n"
        f"def print_{thing}() -> str:\n"
        f'    """Return what the printer writes on the {thing}.\n\n'
        f"    The printer writes one word in capital or small letters, as it is given.\n"
        f'    """\n'
        f"    return {kind}_of_{thing}()"
    )
