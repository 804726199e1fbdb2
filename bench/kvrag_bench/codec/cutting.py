"""Cuts a record after some of its planes: the coarser record that a transfer would hold."""

from __future__ import annotations

from kvrag.codec.container import RecordReader, key_of, write_record
from kvrag.errors import ParameterError
from kvrag.store.memory import MemoryRecord


def cut_record(record: bytes, num_planes: int, num_plane_blocks: int) -> bytes:
    """Return a coarser record: a record's first planes, with a new header.

    Parameters
    ----------
    num_planes
        How many planes to keep, at least 1.
    num_plane_blocks
        Blocks of a plane: as many as the profile's transform has.

    Raises
    ------
    ParameterError
        If the record has fewer planes.
    RecordError
        If it is damaged.
    """
    reader = RecordReader(MemoryRecord(key_of(record), record), key_of(record))
    header = reader.header
    count = num_planes * num_plane_blocks
    if not num_plane_blocks <= count <= len(header.blocks):
        raise ParameterError(
            f"a record of {len(header.blocks)} blocks, {num_plane_blocks} a plane, does not have "
            f"{num_planes} planes"
        )
    view = memoryview(record)
    kept = [view[b.offset : b.offset + b.size_bytes] for b in header.blocks[:count]]
    return write_record(
        key_of(record),
        codec=header.codec,
        spec=header.spec,
        num_tokens=header.num_tokens,
        blocks=[[payload] for payload in kept],
        level=header.level,
        profile=header.profile,
    )
