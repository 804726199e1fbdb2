"""Codecs by name."""

from __future__ import annotations

from collections.abc import Callable

from kvrag.codec.base import Codec
from kvrag.codec.raw import RawCodec
from kvrag.errors import ParameterError

_CODECS: dict[str, Callable[[], Codec]] = {RawCodec.name: RawCodec}


def get_codec(name: str) -> Codec:
    """Return the codec called `name`.

    Raises
    ------
    ParameterError
        When there is none; the message names those there are.
    """
    if name not in _CODECS:
        known = ", ".join(sorted(_CODECS))
        raise ParameterError(f"there is no codec {name!r}; known codecs: {known}")
    return _CODECS[name]()
