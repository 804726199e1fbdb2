"""Pipelines of stages: by a codec's name (``raw``, ``lossless``, ``transform:1``), or as JSON."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from kvrag.arguments import shown
from kvrag.codec.allocation import Allocation, LayerGroups, RateDistortion
from kvrag.codec.names import parse_codec
from kvrag.codec.quantiser import Exact, PerChannel, PerToken, Quantiser, Uniform
from kvrag.codec.transform.anchor_delta import AnchorDelta
from kvrag.codec.transform.base import Transform
from kvrag.codec.transform.none import NoTransform
from kvrag.codec.transform.pca import PCA
from kvrag.errors import ParameterError


@dataclass(frozen=True)
class Rans:
    """The entropy coder: 32-lane interleaved rANS with 12-bit probabilities.

    Attributes
    ----------
    classes
        The most probability tables that a level may have. Rows of similar spread share one.
    """

    name: ClassVar[str] = "rans"
    classes: int = 32

    def __post_init__(self) -> None:
        if not 1 <= self.classes <= 1024:
            raise ParameterError(f"rans: classes must be 1 to 1024, found {self.classes}")


_STAGES: dict[str, dict[str, type[Any]]] = {
    "transform": {stage.name: stage for stage in (NoTransform, AnchorDelta, PCA)},
    "allocation": {stage.name: stage for stage in (LayerGroups, RateDistortion)},
    "quantiser": {stage.name: stage for stage in (Uniform, PerChannel, PerToken, Exact)},
    "coder": {Rans.name: Rans},
}


@dataclass(frozen=True)
class PipelineConfig:
    """The stages of a codec and their parameters."""

    transform: Transform
    allocation: Allocation
    quantiser: Quantiser
    coder: Rans = Rans()

    def to_json(self) -> str:
        """Return the configuration as one line of JSON."""
        stages = {}
        for kind in _STAGES:
            stage = getattr(self, kind)
            values = {field.name: getattr(stage, field.name) for field in dataclasses.fields(stage)}
            stages[kind] = {"name": stage.name, **values}
        return json.dumps(stages)

    @classmethod
    def from_json(cls, text: str) -> PipelineConfig:
        """Read what `to_json` wrote.

        Raises
        ------
        ParameterError
            If it is not JSON, or names an unknown stage or parameter.
        """
        try:
            stages = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ParameterError(f"a codec configuration must be JSON: {error}") from error
        if not isinstance(stages, dict) or set(stages) != set(_STAGES):
            found = sorted(stages) if isinstance(stages, dict) else type(stages).__name__
            raise ParameterError(
                f"a codec configuration must have the stages {sorted(_STAGES)}, found {found}"
            )
        return cls(**{kind: _make_stage(kind, values) for kind, values in stages.items()})


def _make_stage(kind: str, values: Any) -> Any:
    if not isinstance(values, dict) or not isinstance(values.get("name"), str):
        raise ParameterError(
            f"stage {kind!r} must be an object with a 'name', found {shown(values)}"
        )
    parameters = dict(values)
    name = parameters.pop("name")
    stage = _STAGES[kind].get(name)
    if stage is None:
        raise ParameterError(
            f"there is no {kind} {shown(name)}; known: {', '.join(sorted(_STAGES[kind]))}"
        )
    known = {field.name: field for field in dataclasses.fields(stage)}
    for parameter, value in parameters.items():
        if parameter not in known:
            raise ParameterError(
                f"{kind} {shown(name)} has no parameter {shown(parameter)}; it has "
                f"{sorted(known) or 'none'}"
            )
        parameters[parameter] = _typed(
            f"{kind} {shown(name)}: {parameter}", known[parameter], value
        )
    return stage(**parameters)


def _typed(where: str, field: dataclasses.Field[Any], value: Any) -> Any:
    if field.type == "bool" and isinstance(value, bool):
        return value
    if field.type == "int" and type(value) is int:
        return value
    if field.type == "float" and type(value) in (int, float):
        return float(value)
    if field.type == "tuple[float, ...]" and isinstance(value, list | tuple):
        return tuple(_typed(where, _FLOAT, item) for item in value)
    raise ParameterError(f"{where} must be a {field.type}, found {shown(value)}")


_FLOAT: dataclasses.Field[Any] = dataclasses.field()
_FLOAT.type = "float"


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
