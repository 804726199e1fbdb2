"""The names of codecs, their levels, and about how many bytes a token takes with each.

This module imports no tensor library, so commands that only count start at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvrag.arguments import shown
from kvrag.errors import ParameterError
from kvrag.plugins import Table

if TYPE_CHECKING:
    from kvrag.codec.base import Codec

RAW = "raw"
PACKED = "packed"
RAW_HEADS = "raw-heads"
PLAIN: Table[type[Codec]] = Table(
    "kvrag.codecs", {RAW: "kvrag.codec.raw:RawCodec", RAW_HEADS: "kvrag.codec.raw:RawHeadsCodec"}
)
"""Codecs without a profile, by their names in records."""
LEAST_BITS, MOST_BITS = 0.05, 12.0
COMPRESSION_GONE = (
    "Compression by drop, anchors and kvzip left kvrag with 0.3: a codec of fewer bits (packed, "
    "transform:2) takes less and loses less, and eviction corm keeps fewer keys while answering"
)

_CHANNEL_BITS = {"1": 4.6, "2": 3.6, "3": 2.7, "4": 1.8}
"""Bits per element at each level of `cachegen`, measured."""
_PACKED_BITS = 4.2
"""Bits per element of `packed`, as the default of `kvrag.codec.bands.Bands`."""
_OVERHEAD_BITS = 0.3
"""Bits per element that headers, padding and coder states add."""

LEVELS: dict[str, tuple[str, ...]] = {
    "lossless": ("1",),
    PACKED: ("1",),
    "cachegen": tuple(_CHANNEL_BITS),
    "transform": ("4", "2", "1", "0.5"),
    "stream": ("4", "2", "1", "0.5"),
}
"""The predefined levels of each codec that has a profile."""
_TAKES_BITS = ("transform", "stream")


@dataclass(frozen=True)
class CodecName:
    """A codec's name, parsed.

    Attributes
    ----------
    label
        ``PRESET``, or ``PRESET:LEVEL`` if the preset has several levels.
    preset, level
        The name's parts; the level is "" for codecs without a profile.
    """

    label: str
    preset: str
    level: str

    @property
    def takes_profile(self) -> bool:
        """Whether the codec is fitted to a model."""
        return self.preset in LEVELS

    @property
    def bits(self) -> float | None:
        """About how many bits an element takes; None if KV is stored exactly."""
        if self.preset in _TAKES_BITS:
            return float(self.level) + _OVERHEAD_BITS
        if self.preset == PACKED:
            return _PACKED_BITS + _OVERHEAD_BITS
        if self.preset == "cachegen":
            return _CHANNEL_BITS[self.level] + _OVERHEAD_BITS
        return None


def parse_codec(name: str) -> CodecName:
    """Parse ``PRESET`` or ``PRESET:LEVEL``.

    Raises
    ------
    ParameterError
        If the preset or level does not exist (the message lists those that do), or several
        distributions register the preset.
    """
    if not isinstance(name, str):
        raise ParameterError(
            f"codec {shown(name)}: expected a name; known codecs: {known_codecs()}"
        )
    preset, colon, level = name.partition(":")
    if preset not in LEVELS:
        if preset in PLAIN and not colon:
            return CodecName(preset, preset, "")
        raise ParameterError(f"there is no codec {shown(name)}; known codecs: {known_codecs()}")
    levels = LEVELS[preset]
    level = level if colon else levels[0] if len(levels) == 1 else "2"
    if level not in levels:
        if preset not in _TAKES_BITS:
            raise ParameterError(
                f"codec {preset!r} has no level {shown(level)}; it has {', '.join(levels)}"
            )
        level = f"{_bits(name, level):g}"
    return CodecName(preset if len(levels) == 1 else f"{preset}:{level}", preset, level)


def expected_bytes_per_token(codec: str, bytes_per_token: int, bytes_per_element: int) -> int:
    """Return about how many bytes a token will take: rather too many than too few.

    Parameters
    ----------
    codec
        As for `parse_codec`.
    bytes_per_token, bytes_per_element
        The size of a token's KV and of one number in it, in the model's dtype.
    """
    bits = parse_codec(codec).bits
    if bits is None:
        return bytes_per_token
    elements = bytes_per_token // bytes_per_element
    return min(bytes_per_token, int(elements * bits / 8) + 1)


def known_codecs() -> str:
    """Return the names of all codecs, for messages and help texts."""
    names = list(PLAIN)
    for preset, levels in LEVELS.items():
        if preset in _TAKES_BITS:
            names.append(f"{preset}:BITS")
        else:
            names.append(preset if len(levels) == 1 else f"{preset}:{'|'.join(levels)}")
    return ", ".join(names)


def _bits(name: str, level: str) -> float:
    try:
        bits = float(level)
    except ValueError:
        bits = 0.0
    if LEAST_BITS <= bits <= MOST_BITS:
        return bits
    raise ParameterError(
        f"codec {shown(name)}: the level of {shown(name.partition(':')[0])} must be a number of "
        f"bits, {LEAST_BITS} to {MOST_BITS:g}, such as 2 or 0.5"
    )
