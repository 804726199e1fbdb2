"""Names: an open vocabulary built from syllables, cut into splits that share none.

A name is one *head* and one *tail* ("Bram" + "ora"). A head ends in a consonant and a
tail begins with a vowel, so the tokenizer of the tiny model can give each of them one
token and no third token ever straddles the seam.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from itertools import product
from random import Random
from typing import Literal, get_args

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)

_ONSETS = [*"BCDFGHKLMNPRSTVWZ", "Br", "Dr", "Gr", "St", "Tr"]
_VOWELS = "aeiou"
_CODAS = "lmnrskdv"
_MIDDLES = [*"lmnrsvdk", "th"]
_ENDINGS = ["", "a", "e", "o", "y", "is"]
_NUM_HEADS, _NUM_TAILS = 256, 128
# Seven of ten names are for training, one for validation, two for the test.
_SPLIT_OF_BUCKET: list[Split] = [*(SPLITS[0],) * 7, SPLITS[1], SPLITS[2], SPLITS[2]]


def _bucket(text: str, salt: str) -> int:
    return int.from_bytes(hashlib.blake2b((salt + text).encode(), digest_size=8).digest(), "big")


def _pick(candidates: list[str], count: int, salt: str) -> tuple[str, ...]:
    return tuple(sorted(sorted(candidates, key=lambda text: _bucket(text, salt))[:count]))


@lru_cache(maxsize=1)
def name_heads() -> tuple[str, ...]:
    """Return the 256 first halves of names, capitalised, in alphabetical order."""
    return _pick(["".join(p) for p in product(_ONSETS, _VOWELS, _CODAS)], _NUM_HEADS, "head")


@lru_cache(maxsize=1)
def name_tails() -> tuple[str, ...]:
    """Return the 128 second halves of names, in lower case and alphabetical order."""
    return _pick(["".join(p) for p in product(_VOWELS, _MIDDLES, _ENDINGS)], _NUM_TAILS, "tail")


def split_of_name(name: str) -> Split:
    """Return the one split that may use `name`."""
    return _SPLIT_OF_BUCKET[_bucket(name, "split") % len(_SPLIT_OF_BUCKET)]


@lru_cache(maxsize=len(SPLITS))
def names_of_split(split: Split) -> tuple[str, ...]:
    """Return every name that `split` may use (train 70 %, validation 10 %, test 20 %).

    Raises
    ------
    ValueError
        When `split` is not one of `SPLITS`.
    """
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; expected one of {', '.join(SPLITS)}")
    every_name = (head + tail for head, tail in product(name_heads(), name_tails()))
    return tuple(name for name in every_name if split_of_name(name) == split)


class NameSource:
    """Draws names of one split; no name twice until `forget` is called.

    Parameters
    ----------
    split
        Which names may be drawn.
    rng
        Where randomness comes from.
    """

    def __init__(self, split: Split, rng: Random) -> None:
        self._names = names_of_split(split)
        self._rng = rng
        self._taken: set[str] = set()

    def draw(self) -> str:
        """Return a name not drawn since the last `forget`."""
        if len(self._taken) >= len(self._names):
            raise ValueError(f"all {len(self._names)} names of the split are in use")
        while True:
            name = self._rng.choice(self._names)
            if name not in self._taken:
                self._taken.add(name)
                return name

    def avoid(self, name: str) -> None:
        """Do not draw `name` until the next `forget`."""
        self._taken.add(name)

    def forget(self) -> None:
        """Allow every name again."""
        self._taken.clear()
