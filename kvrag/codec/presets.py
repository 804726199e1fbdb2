"""Codecs by the names users type: ``raw``, ``lossless``, ``cachegen:2``, ``transform:1``."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvrag.codec.allocation import LayerGroups, RateDistortion
from kvrag.codec.config import PipelineConfig
from kvrag.codec.quantiser import Exact, PerChannel, Uniform
from kvrag.codec.transform.none import NoTransform
from kvrag.codec.transform.pca import PCA
from kvrag.errors import ParameterError
from kvrag.kvcache import KVSpec

RAW = "raw"
# Of `cachegen` by level, on models measured; of headers, padding and states beside the numbers.
_CHANNEL_BITS = {"1": 4.6, "2": 3.6, "3": 2.7, "4": 1.8}
_OVERHEAD_BITS = 0.3

# What each preset is made of was measured with `kvrag bench codec`; see docs/results.md.
_CONFIGS = {
    "lossless": PipelineConfig(NoTransform(), LayerGroups((1.0,), (1.0,)), Exact()),
    "cachegen": PipelineConfig(NoTransform(), LayerGroups(), PerChannel(0.0)),
    "transform": PipelineConfig(PCA(), RateDistortion(), Uniform(refinements=2)),
    # For links that may be a hundred times slower than they were: more planes, and coarser ones.
    "stream": PipelineConfig(PCA(), RateDistortion(), Uniform(refinements=4)),
}
_DEFAULT_LEVELS = {"lossless": "1", "cachegen": "2", "transform": "2", "stream": "2"}


@dataclass(frozen=True)
class CodecChoice:
    """A codec as a user names it.

    Attributes
    ----------
    label
        ``PRESET`` or ``PRESET:LEVEL``, with the level always written where there are several.
    config
        Its stages; None for ``raw``, which needs no profile.
    level
        Name of the level.
    """

    label: str
    config: PipelineConfig | None
    level: str


def choose_codec(name: str) -> CodecChoice:
    """Return what ``PRESET`` or ``PRESET:LEVEL`` means.

    ``transform`` and ``stream`` take any number of bits as their level: one that is not among the
    usual targets is fitted instead of them.

    Raises
    ------
    ParameterError
        When there is no such preset or level; the message names those there are.
    """
    preset, colon, level = name.partition(":")
    if preset == RAW and not colon:
        return CodecChoice(RAW, None, "")
    config = _CONFIGS.get(preset)
    if config is None:
        raise ParameterError(f"there is no codec {name!r}; known codecs: {known_codecs()}")
    level = level if colon else _DEFAULT_LEVELS[preset]
    levels = config.allocation.level_names()
    if isinstance(config.allocation, RateDistortion) and level not in levels:
        config = replace(config, allocation=_allocation(name, level))
        (level,) = config.allocation.level_names()
    elif level not in levels:
        raise ParameterError(f"codec {preset!r} has no level {level!r}; it has {', '.join(levels)}")
    return CodecChoice(preset if len(levels) == 1 else f"{preset}:{level}", config, level)


def expected_bytes_per_token(choice: CodecChoice, spec: KVSpec) -> int:
    """Return about how many bytes a token will take, not less than it usually does."""
    if choice.config is None or isinstance(choice.config.quantiser, Exact):
        return spec.bytes_per_token
    if isinstance(choice.config.allocation, RateDistortion):
        bits = float(choice.level)
    else:
        bits = _CHANNEL_BITS[choice.level]
    elements = spec.bytes_per_token // spec.dtype.itemsize
    return min(spec.bytes_per_token, int(elements * (bits + _OVERHEAD_BITS) / 8) + 1)


def known_codecs() -> str:
    """Return the names of all codecs, for messages and help texts."""
    names = [RAW]
    for preset, config in _CONFIGS.items():
        levels = config.allocation.level_names()
        if isinstance(config.allocation, RateDistortion):
            names.append(f"{preset}:BITS")
        else:
            names.append(preset if len(levels) == 1 else f"{preset}:{'|'.join(levels)}")
    return ", ".join(names)


def _allocation(name: str, level: str) -> RateDistortion:
    try:
        return RateDistortion((float(level),))
    except ValueError:  # no number, or one out of range
        raise ParameterError(
            f"codec {name!r}: the level of {name.partition(':')[0]!r} is a number of bits, 0.05 to "
            "12, such as 2 or 0.5"
        ) from None
