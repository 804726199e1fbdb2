"""One level of a profile, prepared for coding."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvrag.chunk import ChunkKey
from kvrag.codec.base import Codec, check_kv
from kvrag.codec.container import RecordReader, write_record
from kvrag.codec.pca import Components
from kvrag.codec.profile import Level, Profile
from kvrag.codec.tables import MAX_MAGNITUDE, RADIX
from kvrag.errors import ParameterError
from kvrag.kvcache import ChunkKV, KVSpec
from kvrag.native.entropy import RansModel


@dataclass(frozen=True)
class CodedBlock:
    """One block of a record as whole numbers.

    Attributes
    ----------
    values
        int16 ``[R', T]``.
    raw_tokens
        int64: tokens that are not quantised, ascending.
    raw
        The channels of those tokens, ``[raw tokens, N]`` in the model's dtype.
    """

    values: NDArray[np.int16]
    raw_tokens: torch.Tensor
    raw: torch.Tensor


@dataclass(frozen=True)
class Synthesis:
    """The inverse transform of a block's numbers ``[R, T]`` to one kind of one layer.

    Attributes
    ----------
    channels
        The block's channels that it computes.
    shrink
        float32 ``[R]``.
    basis
        float32 ``[H, R, D]``, multiplied by the steps.
    mean
        float32 ``[H, D]``.
    """

    channels: slice
    shrink: torch.Tensor
    basis: torch.Tensor
    mean: torch.Tensor


class LevelCoder:
    """Tables, steps and bases of one level, computed on first use.

    Parameters
    ----------
    profile
        The level's profile.
    level
        One of its levels.

    Attributes
    ----------
    on_cards
        What `kvrag.codec.card` keeps of it, by card.
    """

    def __init__(self, profile: Profile, level: Level) -> None:
        self.profile = profile
        self.on_cards: dict[Any, Any] = {}
        self.level = level
        self._blocks = {
            (layer_index, kind): number
            for number, plan in enumerate(profile.transform.plans)
            for layer_index in plan.layers
            for kind in plan.kinds
        }
        self._syntheses: dict[tuple[int, int, str], Synthesis] = {}
        self._lock = threading.Lock()

    @cached_property
    def models(self) -> list[RansModel]:
        """The coding tables of each plane."""
        return [RansModel(plane.frequencies) for plane in self.level.planes]

    def classes(self, block: int) -> NDArray[np.uint16]:
        """Return the class of every coded row of a block."""
        return self.level.classes[self.level.class_slices[block]]

    def limits(self, block: int) -> torch.Tensor:
        """Return int32 ``[R']``: the greatest magnitude that the planes of each row can express.

        A row that the coarsest planes omit has only the digits of the others.
        """
        limits = torch.full((len(self.level.steps[block]),), MAX_MAGNITUDE)
        num_planes = len(self.level.planes)
        for number, plane in enumerate(self.level.planes[:-1]):
            digits = num_planes - 1 - number
            limits[plane.num_rows[block] :] = (RADIX**digits - 1) // 2
        return limits

    def shrink(self, plane: int, block: int, num_rows: int) -> torch.Tensor:
        """Return the shrinkage of a block's first rows, float32 ``[R]``."""
        classes = torch.from_numpy(self.classes(block)[:num_rows].astype(np.int64))
        return self.level.planes[plane].shrink[classes]

    def steps(self, plane: int, block: int, num_rows: int) -> torch.Tensor:
        """Return float32 ``[R]``: the step of each row when `plane` is the last that is read."""
        scale = float(RADIX ** (len(self.level.planes) - 1 - plane))
        return self.level.steps[block][:num_rows] * scale

    def channels(self, plane: int, block: int, coded: CodedBlock) -> torch.Tensor:
        """Return a block's channels float32 ``[N, T]``."""
        transform = self.profile.transform
        rows = torch.from_numpy(coded.values).float()
        num_rows = len(rows)
        rows -= rows.sign() * self.shrink(plane, block, num_rows)[:, None]
        rows *= self.steps(plane, block, num_rows)[:, None]
        missing = len(transform.row_layers(block)) - num_rows
        found = transform.synthesise(block, torch.nn.functional.pad(rows, (0, 0, 0, missing)))
        if len(coded.raw_tokens):
            found[:, coded.raw_tokens] = coded.raw.T.float()
        return found

    def synthesis(self, plane: int, layer_index: int, kind: str) -> Synthesis:
        """Return the inverse transform of a block to one kind of one layer (`pca` only).

        Parameters
        ----------
        plane
            The last plane that is read.
        """
        found = self._syntheses.get((plane, layer_index, kind))
        if found is None:
            transform = self.profile.transform
            assert isinstance(transform, Components)
            block = self.block_of(layer_index, kind)
            num_rows = self.level.planes[plane].num_rows[block]
            steps = self.steps(plane, block, num_rows)
            found = Synthesis(
                channels=transform.plans[block].channels_of(self.profile.spec, layer_index, kind),
                shrink=self.shrink(plane, block, num_rows),
                basis=transform.synthesis_basis(block, layer_index, kind, steps),
                mean=transform.mean_of(block, layer_index, kind).contiguous(),
            )
            with self._lock:
                self._syntheses[plane, layer_index, kind] = found
        return found

    def block_of(self, layer_index: int, kind: str) -> int:
        """Return the number of the block that holds one kind of one layer."""
        return self._blocks[layer_index, kind]

    def blocks_of(self, layers: range) -> range:
        """Return the blocks of consecutive layers; a block with others is not among them."""
        inside = [
            number
            for number, plan in enumerate(self.profile.transform.plans)
            if plan.layers.start >= layers.start and plan.layers.stop <= layers.stop
        ]
        return range(inside[0], inside[-1] + 1) if inside else range(0)


class ProfiledCodec(Codec):
    """Base of codecs that a profile drives.

    Parameters
    ----------
    profile
        The profile, fitted to the model.
    """

    label: str = ""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile

    def check_fitted(self, kv: ChunkKV) -> KVSpec:
        """Return the shape and type of KV. Raise ParameterError unless they are the profile's."""
        spec = check_kv(kv)
        if spec != self.profile.spec:
            raise ParameterError(
                f"codec {self.label!r} was fitted to KV of {self.profile.spec}, found {spec}; fit "
                "a profile for this model with 'kvrag profile'"
            )
        return spec

    def write(
        self,
        key: ChunkKey,
        kv: ChunkKV,
        blocks: Sequence[Sequence[bytes | memoryview]],
        level: int = 0,
    ) -> bytes:
        """Return the record of KV, whose blocks are encoded."""
        return write_record(
            key,
            codec=self.name,
            spec=self.profile.spec,
            num_tokens=kv.num_tokens,
            blocks=blocks,
            level=level,
            profile=self.profile.hash,
        )

    def require(self, reader: RecordReader, spec: KVSpec) -> None:
        """Raise RecordError unless a record is this codec's, of `spec` and of the profile."""
        reader.require(self.name, spec)
        reader.require(self.name, self.profile.spec)
        reader.require_profile(self.profile.hash, len(self.profile.levels))
