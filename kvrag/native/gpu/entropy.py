"""Interleaved rANS on a GPU, one warp for each stream. Its bytes are `kvrag.native.entropy`'s."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvrag.errors import ParameterError
from kvrag.native.arrays import byte_view
from kvrag.native.entropy import FREQUENCY_SUM, MAX_SYMBOLS, RansModel, refuse
from kvrag.native.gpu.compiling import launch
from kvrag.native.gpu.tensors import check, check_optional

_STATE_BYTES = 128
# Two warps a block: streams are long, and with fewer, larger blocks processors would be idle.
_THREADS = 64


class DeviceTables:
    """A `RansModel` on a GPU.

    Parameters
    ----------
    model
        The frequencies.
    device
        The GPU.

    Attributes
    ----------
    device
        The GPU, with its index.
    num_classes
        Number of tables.
    decode, encode
        ``[num_classes, 4096]`` and ``[num_classes, 256]`` int32: the entries described in
        ``cuda/include/kvrag/rans.h``.
    """

    def __init__(self, model: RansModel, device: torch.device | str) -> None:
        decode, encode = table_entries(model.frequencies)
        self.decode = torch.from_numpy(decode.view(np.int32)).to(device)
        self.encode = torch.from_numpy(encode.view(np.int32)).to(device)
        self.device = self.decode.device
        self.num_classes = model.num_classes


def table_entries(
    frequencies: NDArray[np.uint16],
) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Return decode entries uint32 ``[C, 4096]`` and encode entries uint32 ``[C, 256]``."""
    num_classes, num_symbols = frequencies.shape
    counts = np.zeros((num_classes, MAX_SYMBOLS), np.uint32)
    counts[:, :num_symbols] = frequencies
    starts = np.cumsum(counts, axis=1, dtype=np.uint32) - counts
    encode = np.where(counts > 0, counts | starts << 16, 0).astype(np.uint32)
    place = np.repeat(np.arange(counts.size), counts.ravel()).reshape(num_classes, FREQUENCY_SUM)
    symbol = (place % MAX_SYMBOLS).astype(np.uint32)
    slot = np.arange(FREQUENCY_SUM, dtype=np.uint32)
    offset = slot - starts.ravel()[place]
    decode = symbol | (counts.ravel()[place] - 1) << 8 | offset << 20
    return decode.astype(np.uint32), encode


class Verdict:
    """The result of decoding a payload: whether it was damaged.

    Parameters
    ----------
    damage
        ``[S]`` int32 on the GPU: the code of damage of each stream, or 0.
    sizes
        ``[S]``: the streams' sizes in bytes.
    """

    def __init__(self, damage: torch.Tensor, sizes: NDArray[np.int64]) -> None:
        self._damage = damage
        self._sizes = sizes

    def check(self) -> None:
        """Wait for the decoder; raise RecordError if it has found damage."""
        for stream, damage in enumerate(self._damage.tolist()):
            if damage:
                refuse(damage, stream, 0, int(self._sizes[stream]))


def stream_offsets(payload: NDArray[np.uint8], num_rows: int) -> NDArray[np.int64]:
    """Return where each stream begins, and where the last one ends.

    Raises
    ------
    RecordError
        If the payload's index is invalid.
    """
    if payload.size < 4:
        refuse(2, 0, 4, payload.size)
    (num_streams,) = struct.unpack("<I", payload[:4].tobytes())
    most = max(num_rows, 1)
    if not 1 <= num_streams <= most:
        refuse(1, 0, most, num_streams)
    index_bytes = 4 + 4 * num_streams
    if payload.size < index_bytes:
        refuse(2, 0, index_bytes, payload.size)
    sizes = np.frombuffer(payload[4:index_bytes].tobytes(), "<u4").astype(np.int64)
    offsets = np.concatenate([[index_bytes], index_bytes + np.cumsum(sizes)])
    if offsets[-1] != payload.size:
        refuse(2, 0, int(offsets[-1]), payload.size)
    wrong = np.flatnonzero((sizes < _STATE_BYTES) | (sizes % 2 != 0))
    if wrong.size:
        refuse(3, int(wrong[0]), 0, int(sizes[wrong[0]]))
    return offsets


def decode_rows(
    tables: DeviceTables,
    payload: Any,
    classes: torch.Tensor,
    out: torch.Tensor,
    *,
    context: torch.Tensor | None = None,
) -> Verdict:
    """Decode a payload, which is in the host's memory, into a tensor on the GPU.

    Parameters
    ----------
    tables
        The tables that the payload was coded with.
    payload
        A contiguous buffer with exactly the payload.
    classes
        ``[R]`` uint16: the table of each row.
    out
        ``[R, T]`` uint8, tokens contiguous, overwritten.
    context
        ``[R, T]`` uint8: added, for each symbol, to the class of its row.

    Returns
    -------
    Verdict
        Check it before you trust `out`. On the GPU, classes that the model does not have are not an
        error: they decode to other symbols, or to damage.

    Raises
    ------
    ParameterError
        If an argument has the wrong shape, type or device.
    RecordError
        If the payload's index is invalid.
    """
    device = tables.device
    check(out, "out", torch.uint8, (None, None), device, contiguous=False)
    num_rows, num_tokens = out.shape
    check(classes, "classes", torch.uint16, (num_rows,), device)
    shape = (num_rows, num_tokens)
    check_optional(context, "context", torch.uint8, shape, device, contiguous=False)
    host = byte_view(payload, "payload")
    offsets = stream_offsets(host, num_rows)
    num_streams = len(offsets) - 1
    pinned = torch.empty(host.size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    pinned.numpy()[:] = host
    damage = torch.empty(num_streams, dtype=torch.int32, device=device)
    launch(
        "rans_decode",
        device,
        (-(-num_streams * 32 // _THREADS), 1),
        pinned.to(device, non_blocking=True),
        torch.from_numpy(offsets).to(device),
        num_streams,
        tables.decode,
        tables.num_classes,
        classes,
        context,
        0 if context is None else context.stride(0),
        out,
        out.stride(0),
        num_rows,
        num_tokens,
        damage,
        num_threads=_THREADS,
    )
    return Verdict(damage, np.diff(offsets))


def encode_rows(
    tables: DeviceTables,
    symbols: torch.Tensor,
    classes: torch.Tensor,
    num_streams: int = 1,
    *,
    context: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the payload of symbols, uint8 on the GPU. It waits for the sizes of the streams.

    Parameters
    ----------
    tables
        The tables.
    symbols
        ``[R, T]`` uint8, tokens contiguous.
    classes, context
        As for `decode_rows`.
    num_streams
        1 to max(R, 1).

    Raises
    ------
    ParameterError
        If an argument has the wrong shape, type or device, or a symbol has frequency 0.
    """
    device = tables.device
    check(symbols, "symbols", torch.uint8, (None, None), device, contiguous=False)
    num_rows, num_tokens = symbols.shape
    check(classes, "classes", torch.uint16, (num_rows,), device)
    shape = (num_rows, num_tokens)
    check_optional(context, "context", torch.uint8, shape, device, contiguous=False)
    if not 1 <= num_streams <= max(num_rows, 1):
        raise ParameterError(
            f"num_streams: expected 1 to {max(num_rows, 1)} for {num_rows} rows, "
            f"found {num_streams}"
        )
    scratch = torch.empty(num_rows * num_tokens, dtype=torch.int16, device=device)
    states = torch.empty(num_streams, 32, dtype=torch.int32, device=device)
    num_words = torch.empty(num_streams, dtype=torch.int64, device=device)
    launch(
        "rans_encode",
        device,
        (-(-num_streams * 32 // _THREADS), 1),
        symbols,
        symbols.stride(0),
        classes,
        context,
        0 if context is None else context.stride(0),
        tables.encode,
        tables.num_classes,
        num_streams,
        num_rows,
        num_tokens,
        scratch,
        states,
        num_words,
        num_threads=_THREADS,
    )
    words = num_words.cpu()
    if bool((words < 0).any()):
        stream = int((words < 0).int().argmax())
        raise ParameterError(
            f"symbols: rows {stream * num_rows // num_streams} to "
            f"{(stream + 1) * num_rows // num_streams}: expected symbols of nonzero frequency in "
            "the classes of their rows, found others"
        )
    sizes = _STATE_BYTES + 2 * words
    index = torch.cat([torch.tensor([num_streams]), sizes]).to(torch.int32)
    offsets = torch.cat([torch.tensor([0]), sizes.cumsum(0)]) + 4 * len(index)
    payload = torch.empty(int(offsets[-1]), dtype=torch.uint8, device=device)
    payload[: 4 * len(index)] = index.view(torch.uint8).to(device)
    launch(
        "rans_pack",
        device,
        (num_streams, 1),
        scratch,
        states,
        offsets.to(device),
        num_streams,
        num_rows,
        num_tokens,
        payload,
    )
    return payload
