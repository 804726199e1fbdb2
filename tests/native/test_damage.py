"""Payloads that are not what was written: always RecordError, never a crash."""

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrag.errors import RecordError
from kvrag.native.entropy import DecodeJob, RansModel, decode_many, decode_rows, encode_rows
from kvrag.native.kernels import instruction_sets, use_instruction_set
from tests.native.cases import make_case
from tests.native.reference_rans import join, split
from tests.support.instructions import kept_instruction_set
from tests.support.properties import examples

CASE = make_case(11, 12, 75)
MODEL = RansModel(CASE.frequencies)
PAYLOAD = encode_rows(MODEL, CASE.symbols, CASE.classes, 3)


def decode(payload: bytes) -> np.ndarray:
    """Decode at the very end of a buffer, so that a read past it would be one past the memory."""
    out = np.zeros_like(CASE.symbols)
    decode_rows(MODEL, payload, CASE.classes, out)
    return out


def test_every_truncation(isa: str) -> None:
    for size in range(len(PAYLOAD)):
        with pytest.raises(RecordError, match=r"expected .*, found"):
            decode(PAYLOAD[:size])
    assert (decode(PAYLOAD) == CASE.symbols).all()


def test_extra_bytes(isa: str) -> None:
    for extra in (b"\0", b"\0\0", bytes(200)):
        with pytest.raises(RecordError, match="length of the payload"):
            decode(PAYLOAD + extra)


def test_lying_sizes(isa: str) -> None:
    first, second, third = split(PAYLOAD)
    lies = {
        "words of stream 0: expected none": [first + b"\0\0", second, third],
        "stream 1: expected an even number": [first, second + b"\0", third],
        "length of stream 2: expected an even number": [first, second, third[:126]],
        "words of stream 1: expected enough": [first, second[:-2], third],
        "stream 0": [second, first, third],
    }
    for message, streams in lies.items():
        with pytest.raises(RecordError, match=message):
            decode(join(streams))
    with pytest.raises(RecordError, match="streams: expected 1 to 12, found 13"):
        decode(join([first] * 13))
    with pytest.raises(RecordError, match="number of streams"):
        decode(join([]))
    for claimed in (2**31, 2**32 - 1):
        with pytest.raises(RecordError, match="number of streams"):
            decode(struct.pack("<I", claimed) + PAYLOAD[4:])
        with pytest.raises(RecordError, match="length of the payload"):
            decode(PAYLOAD[:4] + struct.pack("<I", claimed) + PAYLOAD[8:])


def test_states_below_the_bound(isa: str) -> None:
    with pytest.raises(RecordError, match="states of stream 0: expected all of at least 65536"):
        decode(PAYLOAD[:16] + struct.pack("<I", 65535) + PAYLOAD[20:])


def test_other_rows_or_tables(isa: str) -> None:
    with pytest.raises(RecordError):
        decode_rows(MODEL, PAYLOAD, CASE.classes, np.zeros((12, 76), np.uint8))
    other = RansModel(make_case(12, 1, 1).frequencies)
    with pytest.raises(RecordError):
        decode_rows(other, PAYLOAD, CASE.classes, np.zeros_like(CASE.symbols))


def test_one_damaged_payload_among_others(isa: str) -> None:
    outs = [np.zeros_like(CASE.symbols) for _ in range(3)]
    jobs = [
        DecodeJob(MODEL, payload, CASE.classes, out)
        for payload, out in zip((PAYLOAD, PAYLOAD[:-2], PAYLOAD), outs, strict=True)
    ]
    with pytest.raises(RecordError, match="payload 1: "):
        decode_many(jobs, threads=2)
    assert (outs[0] == CASE.symbols).all()
    assert (outs[2] == CASE.symbols).all()


@settings(max_examples=examples(200))
@given(position=st.integers(0, len(PAYLOAD) - 1), bit=st.integers(0, 7))
def test_flipped_bits(position: int, bit: int) -> None:
    """A flip is noticed, or leaves symbols that every instruction set agrees on."""
    damaged = bytearray(PAYLOAD)
    damaged[position] ^= 1 << bit
    outcomes = set()
    with kept_instruction_set():
        for name in instruction_sets():
            use_instruction_set(name)
            try:
                outcomes.add(decode(bytes(damaged)).tobytes())
            except RecordError as error:
                outcomes.add(str(error).encode())
    assert len(outcomes) == 1
    assert outcomes != {CASE.symbols.tobytes()}


@settings(max_examples=examples(200))
@given(data=st.binary(max_size=600), streams=st.integers(0, 4))
def test_arbitrary_bytes(data: bytes, streams: int) -> None:
    sizes = [len(data) // streams // 2 * 2] * streams if streams else []
    if sizes:
        sizes[-1] = len(data) - sum(sizes[:-1])
    payload = struct.pack(f"<{streams + 1}I", streams, *sizes) + data
    with kept_instruction_set():
        for name in instruction_sets():
            use_instruction_set(name)
            with pytest.raises(RecordError):
                decode(payload)
