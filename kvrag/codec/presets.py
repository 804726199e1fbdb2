"""Codecs by the names users type: ``raw``, ``lossless``, ``cachegen:2``, ``transform:1``."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvrag.codec.allocation import LayerGroups, RateDistortion
from kvrag.codec.config import PipelineConfig
from kvrag.codec.names import parse_codec
from kvrag.codec.quantiser import Exact, PerChannel, Uniform
from kvrag.codec.transform.none import NoTransform
from kvrag.codec.transform.pca import PCA

# What each preset is made of was measured with `kvrag bench codec`; see docs/results/codec.md.
_CONFIGS = {
    "lossless": PipelineConfig(NoTransform(), LayerGroups((1.0,), (1.0,)), Exact()),
    "cachegen": PipelineConfig(NoTransform(), LayerGroups(), PerChannel(0.0)),
    "transform": PipelineConfig(PCA(), RateDistortion(), Uniform(refinements=2)),
    # For links that may be a hundred times slower than they were: more planes, and coarser ones.
    "stream": PipelineConfig(PCA(), RateDistortion(), Uniform(refinements=4)),
}


@dataclass(frozen=True)
class CodecChoice:
    """A codec as a user names it.

    Attributes
    ----------
    label
        ``PRESET`` or ``PRESET:LEVEL``, with the level always written where there are several.
    config
        Its stages; None for a codec without a profile, as ``raw``.
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
    named = parse_codec(name)
    if not named.takes_profile:
        return CodecChoice(named.label, None, "")
    config = _CONFIGS[named.preset]
    if named.level not in config.allocation.level_names():
        config = replace(config, allocation=RateDistortion((float(named.level),)))
    return CodecChoice(named.label, config, named.level)
