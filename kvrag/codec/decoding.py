"""Reading records of the pipeline codec, straight into the fused buffer."""

from __future__ import annotations

import functools
import importlib
import threading
from types import ModuleType

import numpy as np
import torch
from numpy.typing import NDArray

from kvrag.codec.base import Destination, check_layer_index
from kvrag.codec.block import COUNT, MATRIX, BlockReader, place_channels
from kvrag.codec.container import RecordReader
from kvrag.codec.level import CodedBlock, LevelCoder
from kvrag.codec.opened import OpenedRecord
from kvrag.codec.planes import NUM_CONTEXTS
from kvrag.codec.transform.base import KINDS
from kvrag.codec.transform.pca import Components
from kvrag.native import Points, Rotation, contexts, reconstruct, refine
from kvrag.positions.rotary import RotaryTable


class PipelineChunk(OpenedRecord):
    """An opened record of the pipeline codec (an `EncodedChunk`).

    A block's numbers are decoded when the first of its layers is requested, and kept until its last
    layer is placed.
    """

    decodes_on_gpu = True

    def __init__(self, reader: RecordReader, coder: LevelCoder, num_planes: int) -> None:
        super().__init__(reader)
        self._coder = coder
        self._num_planes = num_planes
        self._blocks: dict[int, CodedBlock] = {}
        self._on_device: dict[tuple[int, torch.device], torch.Tensor] = {}
        self._lock = threading.Lock()

    @property
    def plane_bytes(self) -> tuple[int, ...]:
        """Bytes of each plane that the record has, from coarse to fine."""
        blocks = self._reader.header.blocks
        size = len(self._coder.profile.transform.plans)
        return tuple(
            sum(block.padded_bytes for block in blocks[begin : begin + size])
            for begin in range(0, len(blocks), size)
        )

    def use(self, num_planes: int) -> None:
        """Decode only the first `num_planes` planes from now on. Do not call it during decoding."""
        with self._lock:
            self._num_planes = num_planes
            self._blocks.clear()
            self._on_device.clear()

    def read_layer(self, layer_index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return position-free keys and values ``[H, T, D]`` of one layer, on the CPU.

        Raises
        ------
        RecordError
            If the block that holds the layer is not what was written.
        StoreError
            If the store cannot deliver the block.
        ParameterError
            If the layer does not exist.
        """
        spec = self._reader.header.spec
        check_layer_index(layer_index, spec.num_layers)
        with torch.inference_mode(False), torch.no_grad():
            shape = (spec.num_kv_heads, self.num_tokens, spec.head_dim)
            keys, values = (torch.empty(shape, dtype=spec.dtype) for _ in range(2))
            whole = slice(0, self.num_tokens)
            for kind, out in zip(KINDS, (keys, values), strict=True):
                self._write(layer_index, kind, out, whole, None)
        return keys, values

    def place_layer(self, layer_index: int, *into: Destination) -> None:
        """Decode one layer straight into the fused buffer. Raises as `read_layer` does."""
        check_layer_index(layer_index, self._reader.header.spec.num_layers)
        for one in into:
            positions = RotaryTable(one.table.cos[one.rows], one.table.sin[one.rows])
            self._write(layer_index, "keys", one.keys, one.tokens, positions)
            self._write(layer_index, "values", one.values, one.tokens, None)
        self._forget(layer_index)

    def _write(
        self,
        layer_index: int,
        kind: str,
        out: torch.Tensor,
        tokens: slice,
        positions: RotaryTable | None,
    ) -> None:
        """Write one kind of one layer to `out` ``[H, n, D]``, rotated if there are `positions`."""
        coder, plane = self._coder, self._num_planes - 1
        transform = coder.profile.transform
        block = coder.block_of(layer_index, kind)
        coded = self.block(block)
        on_gpu = _is_on_gpu(out)
        if not isinstance(transform, Components) or coded.scales[0] is not None:
            spec = coder.profile.spec
            which = transform.plans[block].channels_of(spec, layer_index, kind)
            channels = coder.channels(plane, block, coded, self.num_tokens)[which, tokens]
            place_channels(channels.to(out.device), out, positions)
            return
        gpu = _gpu_kernels() if on_gpu else None
        if on_gpu and gpu is None:
            # Without kernels for the GPU, those for the CPU write to host memory first.
            host = torch.empty(out.shape, dtype=out.dtype)
            self._write(layer_index, kind, host, tokens, None)
            if positions is None:
                out.copy_(host)
            else:
                positions.place(host.to(out.device), slice(0, len(positions.cos)), out)
            return
        synthesis = coder.synthesis(plane, layer_index, kind, out.device)
        basis, mean = synthesis.basis, synthesis.mean
        rotation = None if positions is None else Rotation(positions.cos, positions.sin)
        if gpu is None:
            reconstruct(
                Points(coded.values[0], synthesis.shrink),
                basis,
                mean,
                out,
                rotation=rotation,
                tokens=tokens,
                threads=torch.get_num_threads(),
            )
        else:
            gpu.reconstruct(
                Points(self._uploaded(block, out.device), synthesis.shrink),
                basis,
                mean,
                out,
                rotation=rotation,
                tokens=tokens,
            )
        for index, token in enumerate(coded.raw_tokens.tolist()):
            if tokens.start <= token < tokens.stop:
                one = slice(token - tokens.start, token - tokens.start + 1)
                there = None
                if positions is not None:
                    there = RotaryTable(positions.cos[one], positions.sin[one])
                channels = coded.raw[index, synthesis.channels].float()[:, None]
                place_channels(channels.to(out.device), out[:, one], there)

    def _forget(self, layer_index: int) -> None:
        """Drop blocks whose last layer this was: prompts are filled layer by layer."""
        with self._lock:
            for number, plan in enumerate(self._coder.profile.transform.plans):
                if plan.layers[-1] == layer_index:
                    self._blocks.pop(number, None)
                    for place in [place for place in self._on_device if place[0] == number]:
                        del self._on_device[place]

    def _uploaded(self, block: int, device: torch.device) -> torch.Tensor:
        """Return a block's numbers on a GPU: a fraction of the size of the KV they represent."""
        found = self._on_device.get((block, device))
        if found is None:
            found = torch.from_numpy(self.block(block).values[0]).to(device)
            self._on_device[block, device] = found
        return found

    def block(self, block: int) -> CodedBlock:
        """Return the whole numbers of a block. Raises as `read_layer` does."""
        with self._lock:
            found = self._blocks.get(block)
            if found is None:
                found = self._blocks[block] = self._read_block(block)
            return found

    def _read_block(self, block: int) -> CodedBlock:
        # Each length below is checked against the rest of the block before it is used.
        coder, num_tokens = self._coder, self.num_tokens
        transform, spec = coder.profile.transform, coder.profile.spec
        fields = BlockReader(self._reader, block)
        plans = transform.matrices(block)
        (num_raw,) = fields.unpack(COUNT)
        sizes = [fields.unpack(MATRIX) for _ in plans]
        raw_tokens = fields.array("<u4", num_raw).astype(np.int64)
        if num_raw and (int(raw_tokens[-1]) >= num_tokens or (np.diff(raw_tokens) <= 0).any()):
            fields.refuse("tokens kept raw", f"ascending, below {num_tokens}", "others")
        num_channels = transform.plans[block].num_channels(spec)
        raw_bytes = fields.array("u1", num_raw * num_channels * spec.dtype.itemsize)
        raw = torch.empty(num_raw, num_channels, dtype=spec.dtype)
        raw.view(torch.uint8).numpy().reshape(-1)[:] = raw_bytes
        if not bool(torch.isfinite(raw).all()):
            fields.refuse("tokens kept raw", "finite numbers", "NaN or infinity")
        num_side = transform.num_side(block, num_tokens)
        side = fields.floats(num_side) if num_side else None
        values, scales = [], []
        widths = transform.widths(num_tokens)
        num_rows = coder.level.planes[0].num_rows[block]
        for index, (plan, width) in enumerate(zip(plans, widths, strict=True)):
            scale = None
            if coder.profile.config.quantiser.scales_tokens and not plan.is_exact:
                scale = fields.floats(plan.num_segments * width).view(plan.num_segments, width)
            scales.append(scale)
            classes = coder.classes(block, index)[: num_rows[index]]
            values.append(fields.values(coder.models[0], classes, width, *sizes[index]))
        fields.end()
        for number in range(1, self._num_planes):
            values = self._refine(number, block, values)
        return CodedBlock(tuple(values), tuple(scales), side, torch.from_numpy(raw_tokens), raw)

    def _refine(
        self, number: int, block: int, coarse: list[NDArray[np.int16]]
    ) -> list[NDArray[np.int16]]:
        """Return the numbers of a plane, given those of the plane before it."""
        coder = self._coder
        fields = BlockReader(self._reader, number * len(coder.profile.transform.plans) + block)
        finer = []
        for index, known in enumerate(coarse):
            num_rows = coder.level.planes[number].num_rows[block][index]
            (num_bytes,) = fields.unpack(COUNT)
            if coder.profile.transform.matrices(block)[index].is_exact:
                fields.symbols(coder.models[number], coder.classes(block, index)[:0], 0, num_bytes)
                finer.append(known)
                continue
            values = np.zeros((num_rows, known.shape[1]), dtype=np.int16)
            values[: len(known)] = known[:num_rows]
            context = np.empty(values.shape, dtype=np.uint8)
            contexts(values, context)
            classes = coder.classes(block, index)[:num_rows] * NUM_CONTEXTS
            symbols = fields.symbols(
                coder.models[number], classes, values.shape[1], num_bytes, context
            )
            refine(values, symbols)
            finer.append(values)
        fields.end()
        return finer


def _is_on_gpu(out: torch.Tensor) -> bool:
    return out.is_cuda


@functools.cache
def _gpu_kernels() -> ModuleType | None:
    """Return the kernels for the GPU, or None without the extra ``gpu``."""
    try:
        importlib.import_module("cuda.core")
    except ImportError:
        return None
    from kvrag.native import gpu

    return gpu
