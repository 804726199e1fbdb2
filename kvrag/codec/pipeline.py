"""The codec that consists of stages, driven by a profile: transform, quantiser, entropy coder.

In each plane, a record has one block for each block of the transform. `docs/format.md` describes
the bytes.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from kvrag.chunk import ChunkKey
from kvrag.codec import tables as t
from kvrag.codec.block import COUNT, MATRIX, pack_streams
from kvrag.codec.container import RecordReader, write_record
from kvrag.codec.decoding import PipelineChunk
from kvrag.codec.level import CodedBlock, LevelCoder, ProfiledCodec
from kvrag.codec.profile import Profile
from kvrag.codec.transforms import greatest_tame
from kvrag.kvcache import ChunkKV, KVSpec

NAME = "pipeline"
# Tokens whose error exceeds the level's mean by this factor are stored as the model gave them:
# attention sinks and the like, which a basis fitted to ordinary tokens does not describe.
OUTLIER_FACTOR = 64.0


class PipelineCodec(ProfiledCodec):
    """Encodes with one level of a profile; reads records of every level of it.

    Parameters
    ----------
    profile
        The profile, fitted to the model.
    label
        The codec's name in indexes and on the command line.
    level
        Name of the level to encode with.

    Raises
    ------
    ParameterError
        If the profile does not have the level.
    """

    name = NAME

    def __init__(self, profile: Profile, label: str, level: str) -> None:
        super().__init__(profile)
        self.label = label
        self._level_index = profile.level_index(level)
        self._coders = [LevelCoder(profile, one) for one in profile.levels]

    def encode(self, key: ChunkKey, kv: ChunkKV) -> bytes:
        spec = self.check_fitted(kv)
        coder = self._coders[self._level_index]
        by_block = [
            self.encode_block(coder, block, plan.gather(kv))
            for block, plan in enumerate(self.profile.transform.plans)
        ]
        # The coarsest plane of all blocks comes first: a reader that stops early has every layer.
        blocks = [planes[index] for index in range(len(coder.level.planes)) for planes in by_block]
        return write_record(
            key,
            codec=NAME,
            spec=spec,
            num_tokens=kv.num_tokens,
            blocks=blocks,
            level=self._level_index,
            profile=self.profile.hash,
        )

    def open_record(self, reader: RecordReader, spec: KVSpec) -> PipelineChunk:
        self.require(reader, spec)
        coder = self._coders[reader.header.level]
        num_planes, left = divmod(len(reader.header.blocks), len(self.profile.transform.plans))
        if left or not 1 <= num_planes <= len(coder.level.planes):
            reader.refuse(
                "number of blocks",
                f"{len(self.profile.transform.plans)} for each of 1 to {len(coder.level.planes)} "
                "planes",
                str(len(reader.header.blocks)),
            )
        return PipelineChunk(reader, coder, num_planes)

    def encode_block(
        self, coder: LevelCoder, block: int, channels: torch.Tensor
    ) -> list[list[bytes | memoryview]]:
        """Return the payloads of a block's planes."""
        wild = channels.abs().amax(0) > greatest_tame(self.profile.spec.dtype)
        tame = torch.where(wild, 0.0, channels) if bool(wild.any()) else channels
        coded = self._quantise(coder, block, tame, torch.zeros(0, dtype=torch.int64))
        finest = len(coder.level.planes) - 1
        found = coder.channels(finest, block, coded)
        errors = self.profile.transform.errors(block, found, tame)
        most = OUTLIER_FACTOR * float(coder.level.distortion[block]) + 1e-12
        outliers = (wild | (errors > most)).nonzero()[:, 0]
        if len(outliers):
            coded = self._quantise(coder, block, tame, outliers)
        raw = channels[:, outliers].T.to(self.profile.spec.dtype).contiguous()
        return self._write_block(coder, block, replace(coded, raw_tokens=outliers, raw=raw))

    def _quantise(
        self, coder: LevelCoder, block: int, channels: torch.Tensor, left_out: torch.Tensor
    ) -> CodedBlock:
        """Return a block's whole numbers. Tokens in `left_out` become zeros, which cost least."""
        level, quantiser = coder.level, self.profile.config.quantiser
        steps = level.steps[block]
        rows = self.profile.transform.analyse(block, channels)[: len(steps)] / steps[:, None]
        rows[:, left_out] = 0.0
        classes = torch.from_numpy(coder.classes(block).astype(np.int64))
        limits = coder.limits(block)[:, None]
        values = t.quantise(rows, level.costs, classes, quantiser.rate_weight).clamp(
            -limits, limits
        )
        nothing = torch.zeros(0, dtype=torch.int64)
        return CodedBlock(values.to(torch.int16).numpy(), nothing, torch.zeros(0, 0))

    def _write_block(
        self, coder: LevelCoder, block: int, coded: CodedBlock
    ) -> list[list[bytes | memoryview]]:
        known = [torch.from_numpy(coded.values).int()]
        for _ in coder.level.planes[1:]:
            known.insert(0, t.coarser(known[0]))
        classes = coder.classes(block)
        n = coder.level.planes[0].num_rows[block]
        frequencies = coder.level.planes[0].frequencies
        symbols, escaped = t.to_symbols(known[0][:n], frequencies, classes[:n])
        streams = pack_streams(coder.models[0], symbols, classes[:n])
        planes: list[list[bytes | memoryview]] = [
            [
                COUNT.pack(len(coded.raw_tokens)),
                MATRIX.pack(len(escaped), len(streams)),
                coded.raw_tokens.numpy().astype("<u4").tobytes(),
                coded.raw.flatten().view(torch.uint8).numpy().data,
                escaped.tobytes(),
                streams,
            ]
        ]
        for number, plane in enumerate(coder.level.planes[1:], 1):
            n = plane.num_rows[block]
            before = known[number - 1][:n]
            streams = pack_streams(
                coder.models[number],
                t.digit_symbols(known[number][:n], before).numpy(),
                classes[:n] * t.NUM_CONTEXTS,
                t.digit_contexts(before).numpy(),
            )
            planes.append([COUNT.pack(len(streams)), streams])
        return planes
