"""The layout of a record in Redis: a list of pieces, and the scripts that change it in one step."""

from __future__ import annotations

import struct

from kvrag.recordformat import piece_ends

_LEAST_PIECE_BYTES = 64 << 10
# A piece must pass within the timeout, on slow lines too.
MOST_PIECE_BYTES = 1 << 20
# Bytes read with the list: a record's header, or all of a small record.
_MOST_HEAD_BYTES = 64 << 10
_LEAST_HEAD_BYTES = 4096

MAGIC = b"kvr1"
# magic, generation, record bytes, number of pieces (the head is the first)
LIST = struct.Struct("<4s16sQI")
END = struct.Struct("<Q")

# At most 65,536 pieces are accepted: a foreign value must not keep Redis busy.
# KEYS: list, then its pieces. ARGV: list, 1 to replace another record, grace in seconds.
# The same list again means that the call is repeated: its answer was lost on the way.
COMMIT = """
local function forget(list)
  if not list or string.sub(list, 1, 4) ~= 'kvr1' or #list < 32 then return end
  local count = math.min(struct.unpack('<I4', list, 29), 65536)
  for i = 1, count - 1 do
    redis.call('EXPIRE', KEYS[1] .. ':' .. string.sub(list, 5, 20) .. ':' .. i, ARGV[3])
  end
end
local old = redis.call('GETRANGE', KEYS[1], 0, 31)
if old == string.sub(ARGV[1], 1, 32) then return 1 end
if old ~= '' and ARGV[2] == '0' then
  for i = 2, #KEYS do redis.call('UNLINK', KEYS[i]) end
  return 0
end
for i = 2, #KEYS do
  if redis.call('PERSIST', KEYS[i]) == 0 then return -1 end
end
redis.call('SET', KEYS[1], ARGV[1])
forget(old)
return 1
"""
# KEYS: list. ARGV: grace in seconds.
DELETE = """
local list = redis.call('GETRANGE', KEYS[1], 0, 31)
if list == '' then return 0 end
redis.call('DEL', KEYS[1])
if string.sub(list, 1, 4) == 'kvr1' and #list == 32 then
  local count = math.min(struct.unpack('<I4', list, 29), 65536)
  for i = 1, count - 1 do
    redis.call('EXPIRE', KEYS[1] .. ':' .. string.sub(list, 5, 20) .. ':' .. i, ARGV[1])
  end
end
return 1
"""


def split_record(record: bytes) -> list[int]:
    """Return the offsets at which a record's head and pieces end."""
    if len(record) <= _LEAST_HEAD_BYTES:
        return [len(record)]
    ends = piece_ends(record) or (0, len(record))
    # The head includes what is read of a header before its length is known.
    chosen = [min(max(ends[0], _LEAST_HEAD_BYTES), _MOST_HEAD_BYTES)]
    for end in ends[1:]:
        # Neighbouring blocks share a piece until it is large enough for a separate name.
        while end - chosen[-1] > MOST_PIECE_BYTES:
            chosen.append(chosen[-1] + MOST_PIECE_BYTES)
        if end - chosen[-1] >= _LEAST_PIECE_BYTES or end == len(record):
            chosen.append(end)
    return chosen
