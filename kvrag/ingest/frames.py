"""Frames between the parsing process and its parent: JSON and bytes, each preceded by its length.

The receiver only parses plain data and executes none of it. A hostile document, or a parser that
it has taken over, can thus affect only its own text.
"""

from __future__ import annotations

import json
import struct
from typing import IO, Any

from kvrag.ingest.limits import MAX_METADATA_CHARACTERS

_LENGTHS = struct.Struct("<IQ")
# Room for a document's metadata with every character escaped, and for a reason.
_MAX_HEAD_BYTES = 6 * MAX_METADATA_CHARACTERS + (1 << 20)


def pack_frame(head: dict[str, Any], body: bytes = b"") -> tuple[bytes, bytes]:
    """Return a frame as two pieces, to be written one after the other."""
    content = json.dumps(head).encode()
    return _LENGTHS.pack(len(content), len(body)) + content, body


def read_frame(stream: IO[bytes], max_body_bytes: int) -> tuple[dict[str, Any], bytes] | None:
    """Return the next frame, or None when the stream ends, even within a frame.

    Raises
    ------
    ValueError
        When the frame is too long or malformed.
    """
    lengths = stream.read(_LENGTHS.size)
    if len(lengths) < _LENGTHS.size:
        return None
    head_bytes, body_bytes = _LENGTHS.unpack(lengths)
    if head_bytes > _MAX_HEAD_BYTES or body_bytes > max_body_bytes:
        raise ValueError("its parser's answer is longer than allowed")
    content, body = stream.read(head_bytes), stream.read(body_bytes)
    if len(content) < head_bytes or len(body) < body_bytes:
        return None
    try:
        head = json.loads(content)
    except RecursionError as error:
        raise ValueError("its parser's answer is nested too deeply") from error
    if not isinstance(head, dict):
        raise ValueError("its parser's answer cannot be read")
    return head, body
