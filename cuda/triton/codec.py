"""Compressed records to rows: all blocks of a group of layers and all chunks, in a few launches.

`payload` has the bytes of records as they are stored, in numbers of 16 bits.
``kvrag/codec/card.py`` writes the tables ``jobs`` and ``entries`` (int64, on the card), a line for
each program: places in `payload` and `numbers`, sizes, and the addresses of what a profile has and
of what is written. Nothing here trusts a stream: whatever its bytes are, no program reads or writes
beyond its own.
"""

import triton
import triton.language as tl

LANES: tl.constexpr = tl.constexpr(32)
SLOTS: tl.constexpr = tl.constexpr(4096)
LOWER_BOUND: tl.constexpr = tl.constexpr(65536)
ZERO_SYMBOL: tl.constexpr = tl.constexpr(128)
ESCAPED: tl.constexpr = tl.constexpr(-128)


@triton.jit
def _address(table, index, element: tl.constexpr):
    return tl.load(table + index).to(tl.pointer_type(element))


@triton.jit
def rans(payload, jobs, numbers, flags, counts, REFINES: tl.constexpr):
    """Decode a stream of one plane (``cuda/include/kvrag/rans.h``). One program each.

    A job is 0. where its states are, 1. how many words follow them, 2. the address of its tables,
    3. that of its rows' classes, 4. the first row's place in `numbers`, 5. rows, 6. tokens,
    7. numbers from row to row, 8. rows that the plane before has, 9. the record's place in `flags`,
    10. how many escaped numbers the record has for the matrix.
    Without `REFINES`, `numbers` get symbols minus 128, of which -128 stands for an escaped one, and
    `counts` how many are escaped; with it, they become those of the next plane. A record's flag
    becomes the code of its damage, if there is any.
    """
    job = jobs + tl.program_id(0) * 11
    lane = tl.arange(0, LANES)
    states = payload + tl.load(job)
    num_words = tl.load(job + 1)
    tables = _address(job, 2, tl.int32)
    classes = _address(job, 3, tl.int16)
    target = numbers + tl.load(job + 4)
    num_rows = tl.load(job + 5)
    num_tokens = tl.load(job + 6)
    stride = tl.load(job + 7)
    num_known = tl.load(job + 8)
    words = states + 2 * LANES
    low = tl.load(states + 2 * lane).to(tl.uint32) & 0xFFFF
    high = tl.load(states + 2 * lane + 1).to(tl.uint32) & 0xFFFF
    state = low | (high << 16)
    taken = num_words * 0
    escaped = tl.zeros([LANES], tl.int32)
    for row in range(num_rows):
        row_class = tl.load(classes + row).to(tl.int32)
        has_known = lane * 0 + row < num_known
        for begin in range(0, num_tokens, LANES):
            token = begin + lane
            live = token < num_tokens
            place = target + row * stride + token
            known = tl.zeros([LANES], tl.int32)
            if REFINES:
                known = tl.load(place, mask=live & has_known, other=0).to(tl.int32)
            table = row_class + tl.minimum(tl.abs(known), 2)
            slot = (state & (SLOTS - 1)).to(tl.int32)
            entry = tl.load(tables + table * SLOTS + slot, mask=live, other=0).to(tl.uint32)
            popped = (((entry >> 8) & (SLOTS - 1)) + 1) * (state >> 12) + (entry >> 20)
            state = tl.where(live, popped, state)
            needs = live & (state < LOWER_BOUND)
            more = needs.to(tl.int32)
            at = taken + tl.cumsum(more, 0) - more
            word = tl.load(words + at, mask=needs & (at < num_words), other=0)
            filled = (state << 16) | (word.to(tl.uint32) & 0xFFFF)
            state = tl.where(needs, filled, state)
            taken += tl.sum(more, 0)
            number = (entry & 255).to(tl.int32) - ZERO_SYMBOL
            if REFINES:
                number = 3 * known + tl.where(known < 0, -number, number)
                number = tl.minimum(tl.maximum(number, -32767), 32767)
            else:
                escaped += (live & (number == ESCAPED)).to(tl.int32)
            tl.store(place, number.to(tl.int16), mask=live)
    # As `Damage` in rans.h: words missing, words left, final states; escapes that nothing is for.
    wrong = tl.max((state != LOWER_BOUND).to(tl.int32), 0) * 7
    if not REFINES:
        num_escaped = tl.sum(escaped, 0)
        tl.store(counts + tl.program_id(0), num_escaped)
        # Where the record has some, `escapes` compares the numbers of all streams.
        wrong = tl.where((num_escaped > 0) & (tl.load(job + 10) == 0), 8, wrong)
    wrong = tl.where(taken < num_words, 6, wrong)
    wrong = tl.where(taken > num_words, 5, wrong)
    if wrong > 0:
        tl.store(flags + tl.load(job + 9), wrong)


@triton.jit
def escapes(payload, jobs, numbers, flags, counts, BLOCK: tl.constexpr):
    """Write the escaped numbers of a stream, which its record has row by row. One program each.

    A job is 0. where its matrix's escaped numbers are, 1. how many there are, 2. the stream, 3. the
    matrix's first one, 4. and the one behind its last; 5. the stream's first row in `numbers`,
    6. rows, 7. tokens, 8. numbers from row to row, 9. the record's place in `flags`, whose flag is
    8 if there are more or fewer than the streams have.
    """
    job = jobs + tl.program_id(0) * 10
    source = payload + tl.load(job)
    num_escaped = tl.load(job + 1)
    stream = tl.load(job + 2)
    target = numbers + tl.load(job + 5)
    num_tokens = tl.load(job + 7)
    stride = tl.load(job + 8)
    size = tl.load(job + 6) * num_tokens
    before = num_escaped * 0
    total = num_escaped * 0
    for other in range(tl.load(job + 3), tl.load(job + 4)):
        count = tl.load(counts + other)
        before += tl.where(other < stream, count, 0)
        total += count
    if total != num_escaped:
        tl.store(flags + tl.load(job + 9), 8)
    for begin in range(0, size, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        place = target + at // num_tokens * stride + at % num_tokens
        number = tl.load(place, mask=at < size, other=0)
        found = ((at < size) & (number == ESCAPED)).to(tl.int32)
        rank = before + tl.cumsum(found, 0) - found
        given = (found > 0) & (rank < num_escaped)
        tl.store(place, tl.load(source + rank, mask=given, other=0), mask=given)
        before += tl.sum(found, 0)


@triton.jit
def synthesise(
    numbers, entries, like, num_heads,
    D: tl.constexpr, SUMS: tl.constexpr, EXACT: tl.constexpr,
    WIDTH: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Dequantise, transform back, and write keys or values of a layer, ``[H, T, D]``.

    Programs: heads of each entry, tiles of BT tokens of the longest entry. An entry is 0. its first
    row in `numbers`, 1. rows, 2. tokens, 3. the address of the first of its channels in the basis
    ``[R, N]``, 4. N, addresses of 5. shrinkage and 6. steps by row, and of 7. factors and 8. means
    by channel, 9. the address to write to. Without `SUMS` there is no basis: rows are the channels,
    the first of which has the number 3. EXACT: products are those of float32. `like` has the type
    of what is written.
    """
    entry = entries + tl.program_id(0) // num_heads * 10
    head = tl.program_id(0) % num_heads
    num_tokens = tl.load(entry + 2)
    token = tl.program_id(1).to(tl.int64) * BT + tl.arange(0, BT)
    if tl.program_id(1) * BT < num_tokens:
        source = numbers + tl.load(entry)
        num_rows = tl.load(entry + 1)
        shrink = _address(entry, 5, tl.float32)
        steps = _address(entry, 6, tl.float32)
        channel = tl.arange(0, WIDTH)
        exists = channel < D
        live = (token < num_tokens)[:, None]
        if SUMS:
            basis = _address(entry, 3, tl.float16) + head * D + channel[None]
            width = tl.load(entry + 4)
            found = tl.zeros([BT, WIDTH], tl.float32)
            for begin in range(0, num_rows, BK):
                row = begin + tl.arange(0, BK)
                coded = row < num_rows
                given = tl.load(
                    source + row[None] * num_tokens + token[:, None],
                    mask=live & coded[None],
                    other=0,
                ).to(tl.float32)
                less = tl.load(shrink + row, mask=coded, other=0)[None]
                step = tl.load(steps + row, mask=coded, other=0)[None]
                less = tl.where(given > 0, less, tl.where(given < 0, -less, 0.0))
                vectors = tl.load(
                    basis + row[:, None] * width, mask=coded[:, None] & exists[None], other=0
                ).to(tl.float32)
                if EXACT:
                    found += tl.dot((given - less) * step, vectors, input_precision="ieee")
                else:
                    found += tl.dot((given - less) * step, vectors, input_precision="tf32")
        else:
            row = tl.load(entry + 3) + head * D + channel
            coded = exists & (row < num_rows)
            given = tl.load(
                source + row[None] * num_tokens + token[:, None], mask=live & coded[None], other=0
            ).to(tl.float32)
            less = tl.load(shrink + row, mask=coded, other=0)[None]
            less = tl.where(given > 0, less, tl.where(given < 0, -less, 0.0))
            found = (given - less) * tl.load(steps + row, mask=coded, other=0)[None]
        place = head * D + channel
        factors = tl.load(_address(entry, 7, tl.float32) + place, mask=exists, other=0)
        means = tl.load(_address(entry, 8, tl.float32) + place, mask=exists, other=0)
        made = found * factors[None] + means[None]
        element: tl.constexpr = like.dtype.element_ty
        target = _address(entry, 9, element) + (head * num_tokens + token)[:, None] * D
        tl.store(target + channel[None], made.to(element), mask=live & exists[None])


@triton.jit
def kept(payload, jobs, BLOCK: tl.constexpr):
    """Write a token that its record has as the model gave it. One program each.

    In numbers of 16 bits, a job is 0. where the record has its channels, 1. how many, 2. channels
    of a head, 3. heads that are next to each other in the record (of one layer), 4. the address to
    write the first to, 5. from head to head there, 6. from layer to layer.
    """
    job = jobs + tl.program_id(0) * 7
    source = payload + tl.load(job)
    num_channels = tl.load(job + 1)
    width = tl.load(job + 2)
    num_heads = tl.load(job + 3)
    target = _address(job, 4, tl.int16)
    by_head = tl.load(job + 5)
    by_layer = tl.load(job + 6)
    for begin in range(0, num_channels, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        head = at // width
        place = head // num_heads * by_layer + head % num_heads * by_head + at % width
        channel = tl.load(source + at, mask=at < num_channels, other=0)
        tl.store(target + place, channel, mask=at < num_channels)


@triton.jit
def unpack(
    payload, entries, levels, powers, like, head_dim,
    WIDTH: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Write keys or values of a layer, ``[H, T, D]``, from rows of numbers of fixed width.

    Programs: entries, bands in tiles of WIDTH channels (of the entry that has most), tiles of BT
    tokens of the longest entry. An entry is 0. the place of its first row in `payload` (bytes),
    1. bytes from row to row, 2. tokens, 3. the address to write to, 4. bands, 5. bytes of a band in
    a row, 6. its numbers K, 7. its channels n, addresses of 8. where numbers are, int32
    ``[bands, K]`` (bits from the band's first byte on, times 8, plus the width), 9. the bases, int8
    ``[bands, K, n]``, 10. scales by band, 11. means by channel; 12. the first channel that is
    written, of the first head, and 13. the one after the last. `levels` (int8) says for 2^w + u
    what the number u of w bits stands for, `powers` the factor for a row's byte. `like` has the
    type of what is written.

    Sums of products are whole numbers below 2^24: in float32, they are exact in any order.
    """
    entry = entries + tl.program_id(0) * 14
    num_tokens = tl.load(entry + 2)
    num_channels = tl.load(entry + 7).to(tl.int32)
    num_tiles = (num_channels + WIDTH - 1) // WIDTH
    band = tl.program_id(1) // num_tiles
    if (tl.program_id(2) * BT < num_tokens) & (band < tl.load(entry + 4)):
        token = tl.program_id(2).to(tl.int64) * BT + tl.arange(0, BT)
        live = token < num_tokens
        rows = payload + tl.load(entry) + token * tl.load(entry + 1) + band * tl.load(entry + 5)
        num_numbers = tl.load(entry + 6)
        places = _address(entry, 8, tl.int32) + band * num_numbers
        channel = tl.program_id(1) % num_tiles * WIDTH + tl.arange(0, WIDTH)
        exists = channel < num_channels
        basis = _address(entry, 9, tl.int8) + band * num_numbers * num_channels + channel[None]
        found = tl.zeros([BT, WIDTH], tl.float32)
        for begin in range(0, num_numbers, BK):
            number = begin + tl.arange(0, BK)
            place = tl.load(places + number, mask=number < num_numbers, other=0)
            width = (place & 7)[None]
            shift = (place >> 3 & 7)[None]
            at = rows[:, None] + (place >> 6)[None]
            coded = live[:, None] & (width > 0)
            # A number lies in two bytes at most; nothing behind the row is read.
            bits = tl.load(at, mask=coded, other=0).to(tl.int32)
            after = coded & (shift + width > 8)
            bits |= tl.load(at + 1, mask=after, other=0).to(tl.int32) << 8
            level = (1 << width) + (bits >> shift & ((1 << width) - 1))
            given = tl.load(levels + level, mask=coded, other=0)
            vectors = tl.load(
                basis + number[:, None] * num_channels,
                mask=(number < num_numbers)[:, None] & exists[None],
                other=0,
            )
            # What has 8 bits is exact in 16.
            found += tl.dot(given.to(tl.float16), vectors.to(tl.float16))
        power = tl.load(powers + tl.load(rows, mask=live, other=0).to(tl.int32))
        factor = tl.load(_address(entry, 10, tl.float32) + band) * power
        place = band * num_channels + channel
        means = tl.load(_address(entry, 11, tl.float32) + place, mask=exists, other=0)
        made = found * factor[:, None] + means[None]
        element: tl.constexpr = like.dtype.element_ty
        first = tl.load(entry + 12).to(tl.int32)
        exists = exists & (place >= first) & (place < tl.load(entry + 13).to(tl.int32))
        place -= first
        into = (place // head_dim * num_tokens * head_dim + place % head_dim)[None]
        target = _address(entry, 3, element) + into
        target += token[:, None] * head_dim
        tl.store(target, made.to(element), mask=live[:, None] & exists[None])
