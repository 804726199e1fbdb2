"""Codecs by their names on the command line: ``raw``, ``lossless``, ``transform:1``."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvrag.codec.allocation import LayerGroups, RateDistortion
from kvrag.codec.config import PipelineConfig
from kvrag.codec.names import parse_codec
from kvrag.codec.quantiser import Exact, PerChannel, Uniform
from kvrag.codec.transform.none import NoTransform
from kvrag.codec.transform.pca import PCA

# The stages were chosen by measuring with `kvrag bench codec`; see docs/results/codec.md.
_CONFIGS = {
    "lossless": PipelineConfig(NoTransform(), LayerGroups((1.0,), (1.0,)), Exact()),
    "cachegen": PipelineConfig(NoTransform(), LayerGroups(), PerChannel(0.0)),
    "transform": PipelineConfig(PCA(), RateDistortion(), Uniform(refinements=2)),
    # More and coarser planes, for links that may become a hundred times slower.
    "stream": PipelineConfig(PCA(), RateDistortion(), Uniform(refinements=4)),
}


@dataclass(frozen=True)
class CodecChoice:
    """A codec that a user has named.

    Attributes
    ----------
    label
        ``PRESET``, or ``PRESET:LEVEL`` if the preset has several levels.
    config
        Its stages; None for a codec without a profile, as ``raw``.
    level
        Name of the level.
    """

    label: str
    config: PipelineConfig | None
    level: str


def choose_codec(name: str) -> CodecChoice:
    """Return the codec that ``PRESET`` or ``PRESET:LEVEL`` names.

    ``transform`` and ``stream`` accept any number of bits as their level. A profile for one that is
    not predefined has only that level.

    Raises
    ------
    ParameterError
        If the preset or level does not exist; the message lists those that do.
    """
    named = parse_codec(name)
    if not named.takes_profile:
        return CodecChoice(named.label, None, "")
    config = _CONFIGS[named.preset]
    if named.level not in config.allocation.level_names():
        config = replace(config, allocation=RateDistortion((float(named.level),)))
    return CodecChoice(named.label, config, named.level)
