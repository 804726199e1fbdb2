"""Entropy coding of matrices of small symbols: interleaved rANS with given tables.

Source: Duda, arXiv 1311.2540, and Giesen, arXiv 1402.3392 (interleaving): 32 lanes, 32-bit
states, 16-bit words, 12-bit probabilities. ``cuda/include/kvrag/rans.h`` describes the bytes. They
do not depend on the machine, on the instruction set, or on the number of threads.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from kvrag.errors import ParameterError, RecordError
from kvrag.native.kernels import ArrayLike, byte_view, check_threads, kernels, view

FREQUENCY_SUM = 4096
MAX_SYMBOLS = 256
_STATE_BYTES = 128
_LOWEST_STATE = 1 << 16
# Decode tables take 16 KiB a class.
MAX_CLASSES = 1 << 14

# For each code of damage in a kernel's report: what is wrong, what was expected, what was found.
# The fields in braces are the report's. The order is that of `Damage` in cuda/include/kvrag/rans.h.
_DAMAGE = {
    1: ("number of streams", "1 to {expected}", "{found}"),
    2: ("length of the payload", "{expected} bytes, as its index says", "{found} bytes"),
    3: ("length of stream {stream}", "an even number of at least 128 bytes", "{found} bytes"),
    4: ("states of stream {stream}", "all of at least 65536", "a lower one"),
    5: ("words of stream {stream}", "enough for its rows", "too few in its {found} bytes"),
    6: ("words of stream {stream}", "none after the last symbol", "more in its {found} bytes"),
    7: ("states of stream {stream} after its last symbol", "65536", "others"),
}


class RansModel:
    """Frequency tables, one for each class of rows, and the coder's tables made from them.

    Parameters
    ----------
    frequencies
        ``[num_classes, num_symbols]`` uint16, at most 256 symbols. Every class sums to 4096. A
        symbol of frequency 0 cannot be coded; one of 4096 costs nothing.

    Attributes
    ----------
    frequencies
        A read-only copy of the given frequencies.

    Raises
    ------
    ParameterError
        If a class does not sum to 4096, or the shape or type is wrong.
    """

    def __init__(self, frequencies: ArrayLike) -> None:
        given = view(frequencies, "frequencies", np.uint16, (None, None))
        num_classes, num_symbols = given.shape
        if not 1 <= num_classes <= MAX_CLASSES or not 1 <= num_symbols <= MAX_SYMBOLS:
            raise ParameterError(
                f"frequencies: expected 1 to {MAX_CLASSES} classes of 1 to {MAX_SYMBOLS} symbols, "
                f"found shape {list(given.shape)}"
            )
        sums = given.sum(axis=1, dtype=np.int64)
        wrong = np.flatnonzero(sums != FREQUENCY_SUM)
        if wrong.size:
            raise ParameterError(
                f"frequencies of class {wrong[0]}: expected a sum of {FREQUENCY_SUM}, "
                f"found {sums[wrong[0]]}"
            )
        self.frequencies: NDArray[np.uint16] = given.copy()
        self.frequencies.flags.writeable = False
        self._tables = kernels.Model(self.frequencies)

    def _check_classes(
        self, classes: ArrayLike, context: ArrayLike | None, shape: tuple[int, int]
    ) -> tuple[NDArray[np.uint16], NDArray[np.uint8] | None]:
        """Return both as numpy arrays; raise ParameterError unless their sums are valid classes."""
        found = view(classes, "classes", np.uint16, (shape[0],), contiguous=True)
        contexts = None if context is None else view(context, "context", np.uint8, shape)
        num_classes, more = len(self.frequencies), 0 if contexts is None else contexts
        if int(found.max(initial=0)) + int(np.max(more, initial=0)) >= num_classes:
            # Perhaps of different rows.
            greatest = found + np.max(more, axis=-1, initial=0).astype(np.int64)
            row = int(greatest.argmax())
            if greatest[row] >= num_classes:
                raise ParameterError(
                    f"classes: row {row}: expected 0 to {num_classes - 1}, contexts added, found "
                    f"{greatest[row]}"
                )
        return found, contexts


class DecodeJob(NamedTuple):
    """One payload to decode; the fields are the arguments of `decode_rows`."""

    model: RansModel
    payload: Any
    classes: ArrayLike
    out: ArrayLike
    context: ArrayLike | None = None


def encode_rows(
    model: RansModel,
    symbols: ArrayLike,
    classes: ArrayLike,
    num_streams: int = 1,
    *,
    context: ArrayLike | None = None,
    threads: int = 1,
) -> bytes:
    """Return the payload that holds `symbols`.

    Parameters
    ----------
    model
        The tables.
    symbols
        ``[R, T]`` uint8, tokens contiguous.
    classes
        ``[R]`` uint16: the table of each row.
    num_streams
        1 to max(R, 1) streams, which are coded and decoded independently. Each costs 132 bytes.
    context
        ``[R, T]`` uint8: added, for each symbol, to the class of its row; None for zeros.
    threads
        The most threads to use.

    Raises
    ------
    ParameterError
        If an argument has the wrong shape or type, or a symbol has frequency 0 in its class; the
        message names the first such row and token.
    """
    matrix = view(symbols, "symbols", np.uint8, (None, None))
    num_rows = matrix.shape[0]
    row_classes, contexts = model._check_classes(classes, context, matrix.shape)
    if not 1 <= num_streams <= max(num_rows, 1):
        raise ParameterError(
            f"num_streams: expected 1 to {max(num_rows, 1)} for {num_rows} rows, "
            f"found {num_streams}"
        )
    payload = kernels.encode(
        model._tables, matrix, row_classes, contexts, num_streams, check_threads(threads)
    )
    if payload is None:
        row, token = kernels.first_uncodable(model._tables, matrix, row_classes, contexts)
        used = int(row_classes[row]) + (0 if contexts is None else int(contexts[row, token]))
        raise ParameterError(
            f"symbols: row {row}, token {token}: expected a symbol of nonzero frequency in class "
            f"{used}, found {matrix[row, token]}"
        )
    return payload


def decode_rows(
    model: RansModel,
    payload: Any,
    classes: ArrayLike,
    out: ArrayLike,
    *,
    context: ArrayLike | None = None,
    threads: int = 1,
) -> None:
    """Decode a payload of `encode_rows`.

    Parameters
    ----------
    model
        The tables that the payload was coded with.
    payload
        A contiguous buffer with exactly the payload.
    classes
        ``[R]`` uint16: the table of each row.
    out
        ``[R, T]`` uint8, tokens contiguous, overwritten.
    context
        ``[R, T]`` uint8: the one that was given to `encode_rows`.
    threads
        The most threads to use. More threads than streams have no use.

    Raises
    ------
    ParameterError
        If an argument has the wrong shape or type.
    RecordError
        If the payload is damaged or belongs to other rows or tables; `out` then holds garbage. This
        detects most damage, but not all: a record's checksums detect the rest.
    """
    decode_many([DecodeJob(model, payload, classes, out, context)], threads=threads)


def decode_many(jobs: Sequence[DecodeJob], *, threads: int = 1) -> None:
    """Decode several payloads at once, with their streams spread over the threads.

    Raises
    ------
    ParameterError, RecordError
        As `decode_rows` does. With several jobs, the message names the job. All jobs run to their
        end, and those without damage have valid output.
    """
    prepared = []
    for job in jobs:
        out = view(job.out, "out", np.uint8, (None, None), writable=True)
        payload = byte_view(job.payload, "payload")
        classes, contexts = job.model._check_classes(job.classes, job.context, out.shape)
        prepared.append((job.model._tables, payload, classes, out, contexts))
    reports = kernels.decode(prepared, check_threads(threads))
    for index, (damage, stream, expected, found) in enumerate(reports):
        if damage:
            where = f"payload {index}: " if len(jobs) > 1 else ""
            refuse(damage, stream, expected, found, where)


def refuse(damage: int, stream: int, expected: int, found: int, where: str = "") -> NoReturn:
    """Raise the RecordError for a kernel's code of damage, which is not 0."""
    fields = {"stream": stream, "expected": expected, "found": found}
    what, wanted, seen = (text.format(**fields) for text in _DAMAGE[damage])
    raise RecordError(f"{where}{what}: expected {wanted}, found {seen}")


def stream_offsets(payload: NDArray[np.uint8], num_rows: int) -> NDArray[np.int64]:
    """Return where each stream of a payload begins, and where the last one ends.

    Raises
    ------
    RecordError
        If the payload's index, a stream's length or its first states are invalid.
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
    states = payload[offsets[:-1, None] + np.arange(_STATE_BYTES)].view("<u4")
    low = np.flatnonzero((states < _LOWEST_STATE).any(axis=1))
    if low.size:
        refuse(4, int(low[0]), 0, 0)
    return offsets


def decode_tables(frequencies: NDArray[np.uint16]) -> NDArray[np.int32]:
    """Return decode tables ``[C, 4096]``, whose entries ``cuda/include/kvrag/rans.h`` describes."""
    num_classes, num_symbols = frequencies.shape
    counts = frequencies.astype(np.uint32)
    starts = np.cumsum(counts, axis=1, dtype=np.uint32) - counts
    place = np.repeat(np.arange(counts.size), counts.ravel()).reshape(num_classes, FREQUENCY_SUM)
    symbol = (place % num_symbols).astype(np.uint32)
    offset = np.arange(FREQUENCY_SUM, dtype=np.uint32) - starts.ravel()[place]
    entries = (symbol | (counts.ravel()[place] - 1) << 8 | offset << 20).astype(np.uint32)
    tables: NDArray[np.int32] = entries.view(np.int32)
    return tables


def ideal_bits(
    model: RansModel,
    symbols: ArrayLike,
    classes: ArrayLike,
    *,
    context: ArrayLike | None = None,
) -> float:
    """Return the code length of `symbols` under the tables, in bits.

    Parameters
    ----------
    model, symbols, classes, context
        As for `encode_rows`.

    Returns
    -------
    float
        The sum over all symbols of -log2(frequency / 4096); infinite if one has frequency 0. A
        payload also has an index and states, 4 bytes plus 132 a stream, and a few words.

    Raises
    ------
    ParameterError
        If an argument has the wrong shape or type.
    """
    matrix = view(symbols, "symbols", np.uint8, (None, None))
    row_classes, contexts = model._check_classes(classes, context, matrix.shape)
    return kernels.ideal_bits(model._tables, matrix, row_classes, contexts)
