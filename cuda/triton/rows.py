"""A decoder layer over chosen rows of one prompt: all that is no product of matrices.

``state`` (int64, on the card) says what differs between prompts, so that a captured graph serves
any: the number of rows, and where tables, keys and values are. ``kvrag/native/gpu/rowstate.py``
writes it. Its first numbers are

0. rows, 1. capacity C of the buffer, 2. first row that counts for `mass`, 3. keys that exist,
4. address of the mass of layer 0, 5. numbers of a layer there,
6. and 7. addresses of cosines and sines of the first table, 8. and 9. of the second,
10. and 11. addresses of keys and values ``[H, C, D]`` of layer 0, and so on.

Rows from the number of rows on are not read: they fill up a bucket. Accumulation is float32.
For numbers that differ between layers and prompts, Triton must not compile again, as it does for
1, for multiples of 16 and for wider numbers: that takes seconds.
"""

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def _address(state, index, element: tl.constexpr):
    """Return a pointer that stands in the state; all of them are aligned to 16 bytes."""
    return tl.multiple_of(tl.load(state + index).to(tl.pointer_type(element)), 16)


@triton.jit
def _capped(scores, cap, SOFTCAP: tl.constexpr):
    if SOFTCAP:
        scores = cap * (1.0 - 2.0 / (tl.exp(2.0 * scores / cap) + 1.0))
    return scores


@triton.jit
def _weighted(numbers, weight, ADDS_ONE: tl.constexpr, element: tl.constexpr):
    """Return normed numbers times weights, rounded where Transformers' norms round."""
    if ADDS_ONE:
        return (numbers * (1.0 + weight.to(tl.float32))).to(element)
    return (numbers.to(element).to(tl.float32) * weight.to(tl.float32)).to(element)


@triton.jit
def norm(
    rows,
    weight,
    out,
    state,
    width,
    epsilon,
    ADDS_ONE: tl.constexpr,
    ADDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write each row's norm to `out`, or with `ADDS` add it to `out`. One program a row."""
    row = tl.program_id(0)
    if row < tl.load(state):
        element: tl.constexpr = rows.dtype.element_ty
        source = rows + row * width
        target = out + row * width
        square = tl.zeros([BLOCK], tl.float32)
        for begin in range(0, width, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            one = tl.load(source + at, mask=at < width, other=0).to(tl.float32)
            square += one * one
        scale = 1.0 / tl.sqrt(tl.sum(square, 0) / width + epsilon)
        for begin in range(0, width, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            one = tl.load(source + at, mask=at < width, other=0).to(tl.float32) * scale
            made = _weighted(one, tl.load(weight + at, mask=at < width, other=0), ADDS_ONE, element)
            if ADDS:
                before = tl.load(target + at, mask=at < width, other=0)
                made = (before.to(tl.float32) + made.to(tl.float32)).to(element)
            tl.store(target + at, made, mask=at < width)


@triton.jit
def gated(gate, up, out, state, width, GELU: tl.constexpr, BLOCK: tl.constexpr):
    """Write an activation of `gate` times `up`. Programs: blocks of all numbers of all rows."""
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    end = tl.load(state) * width
    if begin < end:
        at = begin + tl.arange(0, BLOCK)
        live = at < end
        x = tl.load(gate + at, mask=live, other=0).to(tl.float32)
        if GELU:
            inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
            opened = x * (1.0 - 1.0 / (tl.exp(2.0 * inner) + 1.0))
        else:
            opened = x / (1.0 + tl.exp(-x))
        element: tl.constexpr = gate.dtype.element_ty
        passed = tl.load(up + at, mask=live, other=0).to(tl.float32)
        tl.store(out + at, (opened.to(element).to(tl.float32) * passed).to(element), mask=live)


@triton.jit(do_not_specialize=["layer", "table"])
def rotate(
    query, key, value, query_weight, key_weight, positions, state,
    layer, table, num_asked, num_given, epsilon,
    D: tl.constexpr, NORMS: tl.constexpr, ADDS_ONE: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Norm and rotate queries in place; norm, rotate and write keys; write values.

    Programs: blocks of rows, then heads of queries, keys and values.
    """
    element: tl.constexpr = query.dtype.element_ty
    num_rows = tl.load(state)
    if tl.program_id(0) * BT < num_rows:
        head = tl.program_id(1).to(tl.int64)
        row = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
        live = row < num_rows
        place = tl.load(positions + row, mask=live, other=0)
        capacity = tl.load(state + 1)
        seen = live[:, None]
        if head >= num_asked + num_given:
            head -= num_asked + num_given
            e = tl.arange(0, D)[None]
            values = (
                _address(state, 11 + 2 * layer, element) + (head * capacity + place)[:, None] * D
            )
            given = tl.load(value + (row * num_given + head)[:, None] * D + e, mask=seen, other=0)
            tl.store(values + e, given, mask=seen)
        else:
            half: tl.constexpr = D // 2
            d = tl.arange(0, half)[None]
            cos = _address(state, 6 + 2 * table, tl.float32) + place[:, None] * D + d
            sin = _address(state, 7 + 2 * table, tl.float32) + place[:, None] * D + d
            c = tl.load(cos, mask=seen, other=0)
            s = tl.load(sin, mask=seen, other=0)
            is_query = head < num_asked
            if is_query:
                source = query + (row * num_asked + head)[:, None] * D + d
                target = source
                weight = query_weight + d
            else:
                head -= num_asked
                source = key + (row * num_given + head)[:, None] * D + d
                target = (
                    _address(state, 10 + 2 * layer, element)
                    + (head * capacity + place)[:, None] * D
                    + d
                )
                weight = key_weight + d
            a = tl.load(source, mask=seen, other=0).to(tl.float32)
            b = tl.load(source + half, mask=seen, other=0).to(tl.float32)
            if NORMS:
                scale = 1.0 / tl.sqrt(tl.sum(a * a + b * b, 1) / D + epsilon)
                a = _weighted(a * scale[:, None], tl.load(weight), ADDS_ONE, element).to(tl.float32)
                b = _weighted(b * scale[:, None], tl.load(weight + half), ADDS_ONE, element).to(
                    tl.float32
                )
            tl.store(target, (a * c - b * s).to(element), mask=seen)
            tl.store(target + half, (b * c + a * s).to(element), mask=seen)


@triton.jit(do_not_specialize=["layer", "most_rows", "window"])
def attend(
    query, positions, state, out, lse, partial, counters,
    layer, num_asked, group, most_rows, window: tl.int64, scale, cap,
    D: tl.constexpr, SOFTCAP: tl.constexpr, WHOLE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Gather from the keys up to each row's own, at most `window` of them.

    Programs: tiles of rows times the query heads of one key head, key heads, splits of the keys.
    A tile reads no key after its last row's. With `WHOLE` there is one split. Otherwise the last of
    a tile's splits joins them all, in their order: what they have gathered is in `partial`,
    ``[splits, heads, rows, D + 16]``; `counters`, which are 0 before and after, say who is last.
    """
    element: tl.constexpr = query.dtype.element_ty
    # The longest tiles first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head, split, splits = tl.program_id(1).to(tl.int64), tl.program_id(2), tl.num_programs(2)
    num_rows = tl.load(state)
    if tile * BM < num_rows * group:
        m = tile * BM + tl.arange(0, BM)
        row = m // group
        asked = head * group + m % group
        live = row < num_rows
        place = tl.load(positions + row, mask=live, other=-1)
        stop_all = tl.max(place, 0) + 1
        lowest = tl.min(tl.where(live, place, stop_all), 0)
        begin = tl.maximum(lowest + 1 - window, 0) // BN * BN
        each = tl.cdiv(tl.cdiv(stop_all - begin, splits), BN) * BN
        start = begin + split * each
        stop = tl.minimum(start + each, stop_all)
        d = tl.arange(0, D)
        capacity = tl.load(state + 1)
        keys = _address(state, 10 + 2 * layer, element) + head * capacity * D
        values = _address(state, 11 + 2 * layer, element) + head * capacity * D
        q = tl.load(
            query + (row * num_asked + asked)[:, None] * D + d[None], mask=live[:, None], other=0
        )
        top = tl.full([BM], float("-inf"), tl.float32)
        total = tl.zeros([BM], tl.float32)
        gathered = tl.zeros([BM, D], tl.float32)
        for first in range(start, stop, BN):
            j = first + tl.arange(0, BN)
            exists = j < stop
            k = tl.load(keys + j[None] * D + d[:, None], mask=exists[None], other=0)
            scores = _capped(tl.dot(q, k, input_precision="ieee") * scale, cap, SOFTCAP) * LOG2E
            seen = (j[None] <= place[:, None]) & (j[None] > place[:, None] - window) & exists[None]
            scores = tl.where(seen, scores, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 1))
            safe = tl.where(higher == float("-inf"), 0.0, higher)
            weights = tl.exp2(scores - safe[:, None])
            fade = tl.exp2(top - safe)
            v = tl.load(values + j[:, None] * D + d[None], mask=exists[:, None], other=0)
            gathered = gathered * fade[:, None] + tl.dot(
                weights.to(element), v, input_precision="ieee"
            )
            total = total * fade + tl.sum(weights, 1)
            top = higher
        if WHOLE:
            total = tl.where(live, total, 1.0)
            tl.store(
                out + (row * num_asked + asked)[:, None] * D + d[None],
                (gathered / total[:, None]).to(element),
                mask=live[:, None],
            )
            tl.store(lse + asked * most_rows + row, top + tl.log2(total), mask=live)
        else:
            at = asked * most_rows + row
            step = num_asked * most_rows * (D + 16)
            into = partial + split * step + at * (D + 16)
            tl.store(into[:, None] + d[None], gathered, mask=live[:, None])
            tl.store(into + D, top, mask=live)
            tl.store(into + D + 1, total, mask=live)
            # All threads of this program have stored before others see the count.
            tl.debug_barrier()
            counter = counters + tile * tl.num_programs(1) + head
            if tl.atomic_add(counter, 1, sem="acq_rel") == splits - 1:
                tl.debug_barrier()
                best = tl.full([BM], float("-inf"), tl.float32)
                whole = tl.zeros([BM], tl.float32)
                joined = tl.zeros([BM, D], tl.float32)
                source = partial + at * (D + 16)
                for _ in range(splits):
                    part = tl.load(
                        source[:, None] + d[None], mask=live[:, None], other=0, cache_modifier=".cg"
                    )
                    other = tl.load(
                        source + D, mask=live, other=float("-inf"), cache_modifier=".cg"
                    )
                    more = tl.load(source + D + 1, mask=live, other=1, cache_modifier=".cg")
                    higher = tl.maximum(best, other)
                    safe = tl.where(higher == float("-inf"), 0.0, higher)
                    fade, share = tl.exp2(best - safe), tl.exp2(other - safe)
                    joined = joined * fade[:, None] + part * share[:, None]
                    whole = whole * fade + more * share
                    best = higher
                    source += step
                whole = tl.where(live, whole, 1.0)
                tl.store(
                    out + (row * num_asked + asked)[:, None] * D + d[None],
                    (joined / whole[:, None]).to(element),
                    mask=live[:, None],
                )
                tl.store(lse + at, best + tl.log2(whole), mask=live)
                tl.store(counter, 0)


@triton.jit(do_not_specialize=["layer", "most_rows", "window"])
def mass(
    query, positions, state, lse,
    layer, num_asked, num_given, group, most_rows, window: tl.int64, scale, cap,
    D: tl.constexpr, SOFTCAP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Add to each key's mass the weight that rows that count give it, times its value's norm.

    Programs share the blocks of keys: there may be any number of them.
    """
    element: tl.constexpr = query.dtype.element_ty
    num_rows, capacity = tl.load(state), tl.load(state + 1)
    first, num_keys = tl.load(state + 2), tl.load(state + 3)
    out = tl.load(state + 4).to(tl.pointer_type(tl.float32)) + layer * tl.load(state + 5)
    d = tl.arange(0, D)
    for begin in range(tl.program_id(0) * BN, num_keys, tl.num_programs(0) * BN):
        j = begin + tl.arange(0, BN)
        exists = j < num_keys
        taken = tl.zeros([BN], tl.float32)
        for head in range(0, num_given):
            keys = _address(state, 10 + 2 * layer, element) + head * capacity * D
            values = _address(state, 11 + 2 * layer, element) + head * capacity * D
            k = tl.load(keys + j[None] * D + d[:, None], mask=exists[None], other=0)
            got = tl.zeros([BN], tl.float32)
            for m0 in range(first * group, num_rows * group, BM):
                m = m0 + tl.arange(0, BM)
                row = m // group
                asked = head * group + m % group
                live = row < num_rows
                place = tl.load(positions + row, mask=live, other=-1)
                q = tl.load(
                    query + (row * num_asked + asked)[:, None] * D + d[None],
                    mask=live[:, None],
                    other=0,
                )
                whole = tl.load(lse + asked * most_rows + row, mask=live, other=0)
                scores = _capped(tl.dot(q, k, input_precision="ieee") * scale, cap, SOFTCAP) * LOG2E
                seen = (j[None] <= place[:, None]) & (j[None] > place[:, None] - window)
                got += tl.sum(
                    tl.where(seen & live[:, None], tl.exp2(scores - whole[:, None]), 0.0), 0
                )
            v = tl.load(values + j[:, None] * D + d[None], mask=exists[:, None], other=0).to(
                tl.float32
            )
            taken += got * tl.sqrt(tl.sum(v * v, 1))
        tl.store(out + j, tl.load(out + j, mask=exists, other=0) + taken, mask=exists)
