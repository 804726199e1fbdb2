"""A profile: what a codec has learnt about a model, in one file.

It holds bases, steps and probability tables. It is fitted once on a sample of a model's KV. All
records coded with it share it, so records carry no tables. Each record names its profile's hash,
and decoding with another profile is refused. The file is a safetensors file, whose metadata hold
the configuration as JSON.
"""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from kvrag.arguments import shown
from kvrag.codec.config import PipelineConfig
from kvrag.codec.tables import NUM_CONTEXTS, NUM_SYMBOLS, TOTAL, Exact, value_costs
from kvrag.codec.transforms import FittedTransform, NoTransform, take_tensor
from kvrag.errors import ParameterError, ProfileError
from kvrag.kvcache import DTYPES, KVSpec
from kvrag.native.entropy import MAX_CLASSES

PROFILE_VERSION = 1
MAX_PROFILE_BYTES = 4 << 30
MAX_PLANES = 5
_MAX_DIMENSION = 1 << 16
_MAX_LAYERS_A_TENSOR = 8192
_HASH_BYTES = 20
_METADATA = "kvrag_profile"
_REMEDY = "fit it again with 'kvrag profile', or put the right file back"


@dataclass(frozen=True)
class Plane:
    """The tables of one plane of a level: the coarsest numbers, or one refinement.

    Attributes
    ----------
    frequencies
        uint16: ``[C, 256]`` in the coarsest plane, ``[3 C, 256]`` (class times context) in others.
    num_rows
        How many rows of each block are coded.
    shrink
        float32 ``[C]``: for each class, how much nearer to zero values are than their whole number,
        on average, if this plane is the last that is read.
    bits
        Bits per element with this plane and those before it, on tokens kept out of the fit.
    """

    frequencies: NDArray[np.uint16]
    num_rows: tuple[int, ...]
    shrink: torch.Tensor
    bits: float


@dataclass(frozen=True)
class Level:
    """The steps and tables of one level.

    Attributes
    ----------
    name
        The level's name on the command line.
    steps
        For each block, float32 ``[R']``: the steps of the finest plane for the rows that are coded,
        which are the block's first R'.
    classes
        uint16: the class of every coded row, block by block.
    planes
        The planes, from coarse to fine.
    distortion
        float32 ``[blocks]``: mean squared error of a token in the transform's metric.
    relative_error
        Distortion of all blocks, divided by the variance in the same metric.
    """

    name: str
    steps: tuple[torch.Tensor, ...]
    classes: NDArray[np.uint16]
    planes: tuple[Plane, ...]
    distortion: torch.Tensor
    relative_error: float

    @property
    def bits(self) -> float:
        """Bits per element with all planes."""
        return self.planes[-1].bits

    @property
    def num_classes(self) -> int:
        """C."""
        return len(self.planes[0].frequencies)

    @cached_property
    def costs(self) -> torch.Tensor:
        """Bits of whole numbers of the finest plane, float32 ``[C, 256]``.

        Numbers without a code cost infinity.
        """
        tables = [plane.frequencies for plane in self.planes]
        return value_costs(tables[0], tables[1:], self.num_classes)

    @cached_property
    def class_slices(self) -> tuple[slice, ...]:
        """For each block, the slice of `classes` that belongs to its rows."""
        ends = list(accumulate((len(steps) for steps in self.steps), initial=0))
        return tuple(slice(*ends_of) for ends_of in pairwise(ends))


@dataclass(frozen=True)
class Profile:
    """A fitted codec of one model.

    Attributes
    ----------
    config
        The stages.
    spec
        Shape and type of the model's KV.
    model_fingerprint
        Digest of the model's weights and configuration.
    transform
        The fitted first stage.
    levels
        The levels, in the order of the configuration.
    num_tokens
        How many tokens the profile was fitted to.
    """

    config: PipelineConfig
    spec: KVSpec
    model_fingerprint: str
    transform: FittedTransform
    levels: tuple[Level, ...]
    num_tokens: int

    @cached_property
    def content(self) -> bytes:
        """The bytes of the profile's file."""
        tensors = self.transform.tensors()
        levels = []
        for number, level in enumerate(self.levels):
            for block, steps in enumerate(level.steps):
                tensors[f"level.{number}.steps.{block}.0"] = steps
            tensors[f"level.{number}.classes"] = torch.from_numpy(level.classes.astype(np.int16))
            tensors[f"level.{number}.distortion"] = level.distortion
            for index, plane in enumerate(level.planes):
                where = f"level.{number}.plane.{index}"
                tensors[f"{where}.frequencies"] = torch.from_numpy(
                    plane.frequencies.astype(np.int16)
                )
                tensors[f"{where}.shrink"] = plane.shrink
                tensors[f"{where}.num_rows"] = torch.tensor(plane.num_rows, dtype=torch.int32)
            bits = [plane.bits for plane in level.planes]
            levels.append(
                {"name": level.name, "bits": bits, "relative_error": level.relative_error}
            )
        metadata = {
            "version": PROFILE_VERSION,
            "config": json.loads(self.config.to_json()),
            "num_layers": self.spec.num_layers,
            "num_kv_heads": self.spec.num_kv_heads,
            "head_dim": self.spec.head_dim,
            "dtype": str(self.spec.dtype).removeprefix("torch."),
            "model_fingerprint": self.model_fingerprint,
            "num_tokens": self.num_tokens,
            "levels": levels,
        }
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        return save_tensors(contiguous, metadata={_METADATA: json.dumps(metadata)})

    @cached_property
    def hash(self) -> str:
        """BLAKE2b-160 of the file, 40 hexadecimal digits."""
        return profile_hash(self.content)

    def level_index(self, name: str) -> int:
        """Return the number of the level called `name`.

        Raises
        ------
        ParameterError
            If there is none; the message lists those that exist.
        """
        names = [level.name for level in self.levels]
        if name not in names:
            raise ParameterError(
                f"the profile has no level {name!r}; it has {', '.join(names)}; fit another one "
                "with 'kvrag profile'"
            )
        return names.index(name)

    @classmethod
    def from_bytes(cls, content: bytes, expected_hash: str | None = None) -> Profile:
        """Read a profile's file.

        Parameters
        ----------
        expected_hash
            The hash that the file must have.

        Raises
        ------
        ProfileError
            If the bytes are not a profile, or not the expected one.
        """
        found = profile_hash(content)
        is_it = expected_hash in (None, found)
        _require(is_it, f"a profile has hash {found}, expected {expected_hash}")
        try:
            tensors = load_tensors(content)
            metadata = _metadata_of(content)
            config = PipelineConfig.from_json(json.dumps(metadata["config"]))
            names = "num_layers", "num_kv_heads", "head_dim"
            num_layers, num_heads, head_dim = (_positive(metadata, name) for name in names)
            spec = KVSpec(num_layers, num_heads, head_dim, DTYPES[metadata["dtype"]])
            # A forged header must not claim more layers than its tensors can describe.
            may_fit = spec.num_layers <= len(tensors) * _MAX_LAYERS_A_TENSOR
            _require(may_fit, "the profile lacks tensors of its layers")
            transform = config.transform.load(spec, tensors)
            levels = tuple(
                _load_level(number, found, config, transform, tensors)
                for number, found in enumerate(metadata["levels"])
            )
            _require(levels, "a profile has no level")
            return cls(
                config=config,
                spec=spec,
                model_fingerprint=str(metadata["model_fingerprint"]),
                transform=transform,
                levels=levels,
                num_tokens=int(metadata["num_tokens"]),
            )
        except _MALFORMED as error:
            raise ProfileError(f"this is not a codec profile: {error}; {_REMEDY}") from error


_MALFORMED = (
    SafetensorError,
    ParameterError,
    ArithmeticError,
    LookupError,
    RecursionError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""The exceptions that reading arbitrary bytes may raise."""


def profile_hash(content: bytes) -> str:
    """Return BLAKE2b-160 of a profile's file, 40 hexadecimal digits."""
    return hashlib.blake2b(content, digest_size=_HASH_BYTES).hexdigest()


def _metadata_of(content: bytes) -> dict[str, Any]:
    header_bytes = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + header_bytes])
    metadata = json.loads(header["__metadata__"][_METADATA])
    version = metadata.get("version") if isinstance(metadata, dict) else metadata
    is_known = isinstance(metadata, dict) and version == PROFILE_VERSION
    _require(is_known, f"expected a profile of version {PROFILE_VERSION}, found {version}")
    return dict(metadata)


def _require(holds: object, what: str) -> None:
    if not holds:
        raise ProfileError(f"{what}; {_REMEDY}")


def _positive(metadata: Mapping[str, Any], name: str) -> int:
    value = metadata[name]
    is_sound = type(value) is int and 1 <= value <= _MAX_DIMENSION
    _require(is_sound, f"the profile's {name!r} is {shown(value)}")
    return int(value)


def _load_level(
    number: int,
    found: Mapping[str, Any],
    config: PipelineConfig,
    transform: FittedTransform,
    tensors: Mapping[str, torch.Tensor],
) -> Level:
    name, bits = str(found["name"]), list(found["bits"])
    level = f"the profile's level {name!r}"
    steps = []
    most_rows = [len(transform.row_layers(block)) for block in range(len(transform.plans))]
    for block, most in enumerate(most_rows):
        where = f"level.{number}.steps.{block}.0"
        tensor = take_tensor(tensors, where, [-1], torch.float32)
        fits = len(tensor) <= most and bool((tensor > 0).all())
        _require(fits, f"the profile's {where!r} does not fit its rows")
        steps.append(tensor)
    coded = list(map(len, steps))
    classes = _unsigned(tensors, f"level.{number}.classes", [sum(coded)])
    planes: list[Plane] = []
    _require(1 <= len(bits) <= MAX_PLANES, f"{level} has {len(bits)} planes")
    for index, plane_bits in enumerate(bits):
        where = f"level.{number}.plane.{index}"
        frequencies = _unsigned(tensors, f"{where}.frequencies", [-1, NUM_SYMBOLS])
        num_classes = len(planes[0].frequencies) if planes else len(frequencies)
        num_tables = num_classes * (NUM_CONTEXTS if planes else 1)
        sums = frequencies.astype(np.int64).sum(axis=1)
        _require(len(sums) <= MAX_CLASSES, f"{where!r} has more than {MAX_CLASSES} tables")
        fits = len(sums) == num_tables and bool((sums == TOTAL).all())
        _require(fits, f"the tables of {where!r} do not match its classes")
        shrink = take_tensor(tensors, f"{where}.shrink", [num_classes], torch.float32)
        counts = _unsigned(tensors, f"{where}.num_rows", [-1], torch.int32).tolist()
        fits = len(counts) == len(coded) and all(map(operator.le, counts, coded))
        _require(fits, f"the rows of {where!r} do not match its matrices")
        planes.append(Plane(frequencies, tuple(counts), shrink, float(plane_bits)))
    has_classes = num_classes and (not len(classes) or int(classes.max()) < num_classes)
    _require(has_classes, f"{level} names a class it lacks")
    distortion = take_tensor(tensors, f"level.{number}.distortion", [len(steps)], torch.float32)
    error = float(found["relative_error"])
    is_plain = isinstance(config.transform, NoTransform) and len(planes) == 1
    is_lossless = is_plain and coded == most_rows
    _require(is_lossless or not isinstance(config.quantiser, Exact), f"{level} is not lossless")
    return Level(name, tuple(steps), classes, tuple(planes), distortion, error)


def _unsigned(
    tensors: Mapping[str, torch.Tensor],
    name: str,
    shape: list[int],
    dtype: torch.dtype = torch.int16,
) -> NDArray[Any]:
    tensor = take_tensor(tensors, name, shape, dtype)
    _require(not bool((tensor < 0).any()), f"the profile's {name!r} holds negative numbers")
    return tensor.numpy().astype(np.uint16 if dtype == torch.int16 else np.int64)
