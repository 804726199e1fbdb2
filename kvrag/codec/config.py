"""Pipelines of stages: by a codec's name (``raw``, ``lossless``, ``transform:1``), or as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar

import torch

from kvrag.arguments import shown
from kvrag.codec.bands import Bands
from kvrag.codec.names import CodecName, parse_codec
from kvrag.codec.pca import PCA
from kvrag.codec.tables import Exact, PerChannel, Quantiser, Uniform
from kvrag.codec.transforms import NoTransform
from kvrag.errors import ParameterError

# Bit allocation between layers and rows (channels, components): relative quantiser steps.


MAX_LEVELS = 16


@dataclass(frozen=True)
class LayerGroups:
    """CacheGen's allocation: steps grow from the first third of the layers to the last.

    Source: CacheGen (SIGCOMM 2024, section 5.2): errors in early layers hurt more, so their bins
    are finer: 0.5, 1 and 1.5 at the default level, here in units of the quantiser's scale.

    Attributes
    ----------
    bins
        The step of each third.
    factors
        The bins' factor at each level, finest first.
    """

    name: ClassVar[str] = "layer_groups"
    bins: tuple[float, ...] = (0.5, 1.0, 1.5)
    factors: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0)

    def __post_init__(self) -> None:
        for what, values in (("bins", self.bins), ("factors", self.factors)):
            if not 1 <= len(values) <= MAX_LEVELS or not all(1e-3 <= v <= 1e3 for v in values):
                raise ParameterError(
                    f"layer_groups: {what} are 1 to {MAX_LEVELS} numbers from 0.001 to 1000, "
                    f"found {values}"
                )

    def level_names(self) -> tuple[str, ...]:
        """Return the levels' names on the command line, in the order of the profile."""
        return tuple(str(number + 1) for number in range(len(self.factors)))

    def target_bits(self, level: int) -> None:
        """Return the bits per element that a level must have; None: its steps are fixed."""

    def relative_steps(self, level: int, layers: torch.Tensor, num_layers: int) -> torch.Tensor:
        """Return float32 ``[R]``: the bin of each row's third, times the level's factor.

        Parameters
        ----------
        layers
            int64 ``[R]``: the layer of each row, or -1.
        """
        third = (layers.clamp(min=0) * len(self.bins)) // num_layers
        return torch.tensor(self.bins)[third] * self.factors[level]


@dataclass(frozen=True)
class RateDistortion:
    """Reverse water-filling: one step for all rows, chosen so that a level has the requested bits.

    If errors in all rows count alike, distortion at a given rate is least when every coded row has
    equal distortion and rows that vary less get no bits (Cover and Thomas, 10.3.3). The record
    omits rows whose numbers all round to 0.

    Attributes
    ----------
    bits
        The target of each level, in bits per element of KV, without tables and headers.
    """

    name: ClassVar[str] = "rate_distortion"
    bits: tuple[float, ...] = (4.0, 2.0, 1.0, 0.5)

    def __post_init__(self) -> None:
        if not 1 <= len(self.bits) <= MAX_LEVELS or not all(0.05 <= b <= 12 for b in self.bits):
            raise ParameterError(
                f"rate_distortion: bits are 1 to {MAX_LEVELS} numbers from 0.05 to 12, "
                f"found {self.bits}"
            )
        if len(set(self.bits)) < len(self.bits):
            raise ParameterError(f"rate_distortion: a target appears twice in {self.bits}")

    def level_names(self) -> tuple[str, ...]:
        """Return the targets as they are typed: "4", "2", "0.5"."""
        return tuple(f"{value:g}" for value in self.bits)

    def target_bits(self, level: int) -> float:
        """Return the target."""
        return self.bits[level]

    def relative_steps(self, level: int, layers: torch.Tensor, num_layers: int) -> torch.Tensor:
        """Return ones."""
        return torch.ones(len(layers))


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
    "transform": {stage.name: stage for stage in (NoTransform, PCA, Bands)},
    "allocation": {stage.name: stage for stage in (LayerGroups, RateDistortion)},
    "quantiser": {stage.name: stage for stage in (Uniform, PerChannel, Exact)},
    "coder": {Rans.name: Rans},
}
_GONE = ("anchor_delta", "per_token")
Transform = NoTransform | PCA | Bands


@dataclass(frozen=True)
class PipelineConfig:
    """The stages of a codec and their parameters."""

    transform: Transform
    allocation: LayerGroups | RateDistortion
    quantiser: Quantiser
    coder: Rans = Rans()

    def to_json(self) -> str:
        """Return the configuration as one line of JSON."""
        stages = {kind: getattr(self, kind) for kind in _STAGES}
        return json.dumps({kind: {"name": one.name, **asdict(one)} for kind, one in stages.items()})

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
    if name in _GONE:
        raise ParameterError(
            f"{kind} {name!r} left kvrag with 0.3: ingest the documents again, in an index with "
            "another codec"
        )
    if stage is None:
        raise ParameterError(
            f"there is no {kind} {shown(name)}; known: {', '.join(sorted(_STAGES[kind]))}"
        )
    known = {field.name: field.type for field in fields(stage)}
    for parameter, value in parameters.items():
        if parameter not in known:
            raise ParameterError(
                f"{kind} {shown(name)} has no parameter {shown(parameter)}; it has "
                f"{sorted(known) or 'none'}"
            )
        where = f"{kind} {shown(name)}: {parameter}"
        parameters[parameter] = _typed(where, str(known[parameter]), value)
    return stage(**parameters)


_PLAIN: dict[str, tuple[type, ...]] = {"bool": (bool,), "int": (int,), "float": (int, float)}


def _typed(where: str, kind: str, value: Any) -> Any:
    if kind == "tuple[float, ...]" and isinstance(value, list | tuple):
        return tuple(_typed(where, "float", item) for item in value)
    if type(value) not in _PLAIN.get(kind, ()):
        raise ParameterError(f"{where} must be a {kind}, found {shown(value)}")
    return float(value) if kind == "float" else value


# The stages were chosen by measuring with `kvrag bench codec`; see docs/results/codec.md.
_CONFIGS = {
    "lossless": PipelineConfig(NoTransform(), LayerGroups((1.0,), (1.0,)), Exact()),
    # Nothing of it is coded by tables: the other stages count for nothing.
    "packed": PipelineConfig(Bands(), LayerGroups((1.0,), (1.0,)), Uniform(0.0)),
    "cachegen": PipelineConfig(NoTransform(), LayerGroups(), PerChannel(0.0)),
    "transform": PipelineConfig(PCA(), RateDistortion(), Uniform(refinements=2)),
    # More and coarser planes, for links that may become a hundred times slower.
    "stream": PipelineConfig(PCA(), RateDistortion(), Uniform(refinements=4)),
}


@dataclass(frozen=True)
class CodecChoice(CodecName):
    """A codec that a user has named.

    Attributes
    ----------
    config
        Its stages; None for a codec without a profile, as ``raw``.
    """

    config: PipelineConfig | None


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
    config = _CONFIGS.get(named.preset)
    if config is not None and named.level not in config.allocation.level_names():
        config = replace(config, allocation=RateDistortion((float(named.level),)))
    return CodecChoice(named.label, named.preset, named.level, config)
