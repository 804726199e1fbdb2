"""Stored rows into a prompt's buffer: all chunks of a group of layers in one launch.

A chunk lies anywhere on the card: layer after layer, keys ``[H, T, D]`` without positions, then
values ``[H, T, D]``, as its record has them. ``parts`` (int64, on the card) says which rows go
where, six numbers a part:

0. the address where the chunk's layer 0 is, or would be, 1. elements from layer to layer,
2. tokens T of the record, 3. the part's first token there,
4. its first row in the prompt, 5. how many there are.

Addresses are multiples of 16 bytes, the second number is one of D.
"""

import triton
import triton.language as tl


# For what differs between prompts, Triton must not compile again: that takes seconds.
@triton.jit(do_not_specialize=["first_layer", "capacity"])
def place(
    parts,
    cos,
    sin,
    keys,
    values,
    first_layer,
    num_heads,
    num_rotated,
    capacity,
    D: tl.constexpr,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
    BT: tl.constexpr,
):
    """Rotate keys to their rows, and write them and values to ``[L, H, C, D]``.

    Programs: tiles of BT rows of the longest part, parts, heads of each layer, from `first_layer`
    on. Cosines and sines are ``[N, num_rotated]`` float32, the same in both halves; channels beyond
    are copied. HALF and WIDTH are D / 2 and D, rounded up to powers of two.
    """
    row = tl.program_id(0) * BT + tl.arange(0, BT)
    part = parts + tl.program_id(1) * 6
    layer = first_layer + (tl.program_id(2) // num_heads).to(tl.int64)
    head = tl.program_id(2) % num_heads
    element: tl.constexpr = keys.dtype.element_ty
    chunk = tl.multiple_of(tl.load(part).to(tl.pointer_type(element)), 16)
    stride = tl.multiple_of(tl.load(part + 1), D)
    num_tokens = tl.load(part + 2)
    first_token = tl.load(part + 3)
    first_row = tl.load(part + 4)
    live = (row < tl.load(part + 5))[:, None]

    block = chunk + layer * stride
    source = ((head * num_tokens + first_token + row) * D)[:, None]
    target = (((layer * num_heads + head) * capacity + first_row + row) * D)[:, None]
    half = num_rotated // 2
    channel = tl.arange(0, HALF)[None]
    angle = (first_row + row)[:, None] * num_rotated + channel
    turned = live & (channel < half)
    c = tl.load(cos + angle, mask=turned, other=0)
    s = tl.load(sin + angle, mask=turned, other=0)
    a = tl.load(block + source + channel, mask=turned, other=0).to(tl.float32)
    b = tl.load(block + source + half + channel, mask=turned, other=0).to(tl.float32)
    tl.store(keys + target + channel, (a * c - b * s).to(element), mask=turned)
    tl.store(keys + target + half + channel, (b * c + a * s).to(element), mask=turned)

    every = tl.arange(0, WIDTH)[None]
    exists = live & (every < D)
    passed = exists & (every >= num_rotated)
    tl.store(keys + target + every, tl.load(block + source + every, mask=passed), mask=passed)
    behind = block + num_heads * num_tokens * D
    tl.store(values + target + every, tl.load(behind + source + every, mask=exists), mask=exists)
