"""The layout of records that stores rely on, against records as codecs write them."""

import random

import pytest

from kvrag.codec.container import RecordReader, write_record
from kvrag.errors import RecordError
from kvrag.recordformat import check_record, piece_ends
from kvrag_testing.codec_contract import KEY, OTHER_KEY, BytesSource, spec_of


def make_record(num_blocks: int = 3) -> bytes:
    blocks = [[bytes([number % 256]) * (100 * number + 1)] for number in range(num_blocks)]
    return write_record(KEY, codec="test", spec=spec_of(), num_tokens=5, blocks=blocks)


@pytest.mark.parametrize("num_blocks", [1, 3, 400])
def test_pieces_are_header_and_blocks(num_blocks: int) -> None:
    record = make_record(num_blocks)
    blocks = RecordReader(BytesSource(record), KEY).header.blocks
    expected = [block.offset for block in blocks] + [len(record)]
    assert list(piece_ends(record)) == expected
    assert list(piece_ends(memoryview(record))) == expected


def test_a_whole_record_is_sound() -> None:
    check_record(KEY, make_record())
    check_record(KEY, memoryview(make_record(400)))


def test_another_key() -> None:
    with pytest.raises(RecordError, match="names another key"):
        check_record(OTHER_KEY, make_record())


@pytest.mark.parametrize("content", [b"", b"x", b"x" * 500, make_record()[:-64], make_record() * 2])
def test_what_is_no_record(content: bytes) -> None:
    assert piece_ends(content) == ()
    with pytest.raises(RecordError, match="expected an intact record of format version 2"):
        check_record(KEY, content)


def test_any_flipped_byte_is_noticed() -> None:
    record = make_record()
    for offset in range(len(record)):
        damaged = bytearray(record)
        damaged[offset] ^= 1 << offset % 8
        with pytest.raises(RecordError):
            check_record(KEY, damaged)
        ends = piece_ends(damaged)
        assert ends == () or (ends[-1] == len(record) and list(ends) == sorted(set(ends)))


def test_forged_headers_raise_nothing_else() -> None:
    chance = random.Random(3)
    for _ in range(2000):
        forged = bytearray(make_record())
        for _ in range(chance.randrange(1, 6)):
            forged[chance.randrange(8, 200)] = chance.choice([0, 1, 0x7F, 0xFF])
        ends = piece_ends(forged)
        assert ends == () or ends[-1] == len(forged)
