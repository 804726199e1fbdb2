"""A long fuzzing run without a framework: ``python -m tests.codec.fuzz --records 1000000``.

The same targets and kinds of damage as `test_fuzz`, drawn by a plain generator, at some thousand
records a second. Ends with an error at the first record that is neither refused as it should be nor
decoded to what it says; prints its seed, so that it can be made again.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from random import Random

from tests.codec import forge
from tests.codec.test_fuzz import CONFIGS, SPEC, Target, check_forged, read, target

KINDS = ("damaged", "forged header", "forged blocks")


def damage(record: bytearray, other: bytes, rng: Random, first: int = 0) -> None:
    """Change a stretch of a record in one of the ways bytes go wrong."""
    if len(record) <= first:
        return
    start, size = rng.randrange(first, len(record)), rng.randrange(200)
    kind = rng.choice(("flip", "set", "fill", "cut", "drop", "insert", "graft"))
    if kind == "flip":
        record[start] ^= 1 << rng.randrange(8)
    elif kind == "set":
        record[start] = rng.randrange(256)
    elif kind == "fill":
        length = len(record[start : start + size])
        record[start : start + size] = bytes([rng.choice((0, 255))]) * length
    elif kind == "cut":
        del record[start:]
    elif kind == "drop":
        del record[start : start + size]
    elif kind == "insert":
        record[start:start] = rng.randbytes(1 + rng.randrange(64))
    else:
        record[start : start + size] = other[start : start + size]


def number(chosen: Target, rng: Random) -> int:
    """Return a number near where comparisons and sums go wrong."""
    near = rng.choice((0, 1 << rng.randrange(64), len(chosen.record), chosen.header_bytes))
    return abs(near + rng.randrange(-3, 4)) if rng.random() < 0.8 else rng.getrandbits(64)


def forge_header(chosen: Target, rng: Random) -> bytes:
    """Return a record with lying fields under checksums that are right."""
    record = bytearray(chosen.record)
    for _ in range(rng.choice((1, 1, 2, 3))):
        if rng.random() < 0.5:
            field = rng.choice(sorted(forge.FIELDS))
            kind = forge.FIELDS[field][1]
            if kind.endswith("s"):
                forge.set_field(record, field, rng.randbytes(rng.randrange(int(kind[:-1]) + 1)))
            else:
                bits = 64 if kind == "Q" else 32
                forge.set_field(record, field, number(chosen, rng) % 2**bits)
        else:
            field = rng.choice(sorted(forge.BLOCK_FIELDS))
            block = rng.randrange(SPEC.num_layers)
            forge.set_block_field(record, block, field, number(chosen, rng) % 2**64)
    if rng.random() < 0.5:
        forge.reseal_blocks(record)
    return forge.reseal(record, chosen.header_bytes)


def forge_blocks(chosen: Target, rng: Random) -> bytes:
    """Return a record whose blocks hold anything under checksums that are right."""
    record = bytearray(chosen.record)
    for _ in range(rng.choice((1, 1, 2, 4))):
        start = rng.randrange(chosen.header_bytes, len(record))
        if rng.random() < 0.5:  # lengths and counts stand at the head of blocks
            start = chosen.header_bytes + rng.randrange(24)
        size = rng.choice((1, 2, 4, 16))
        value = number(chosen, rng) % 256**size
        record[start : start + size] = value.to_bytes(size, "little")[: len(record) - start]
    forge.reseal_blocks(record)
    return forge.reseal(record, chosen.header_bytes)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    chosen_options = parser.parse_args()
    rng = Random(chosen_options.seed)
    targets = [target(name) for name in ("raw", *CONFIGS)]
    seen: Counter[str] = Counter()
    started = time.perf_counter()
    for done in range(chosen_options.records):
        chosen = rng.choice(targets)
        kind = rng.choice(KINDS)
        if kind == "damaged":
            mutated = bytearray(chosen.record)
            for _ in range(rng.choice((1, 1, 1, 2, 4))):
                damage(mutated, chosen.other, rng)
            record = bytes(mutated)
            is_whole = record in (chosen.record, chosen.other)
            refused = read(chosen, record) is None
            assert refused != is_whole, (chosen_options.seed, done)
        else:
            make = forge_header if kind == "forged header" else forge_blocks
            record = make(chosen, rng)
            try:
                check_forged(chosen, record)
            except Exception as error:
                raise AssertionError(f"seed {chosen_options.seed}, record {done}") from error
        seen[f"{chosen.codec.label}: {kind}"] += 1
    seconds = time.perf_counter() - started
    print(f"{chosen_options.records:,} records in {seconds:,.0f} s, seed {chosen_options.seed}")
    for name, count in sorted(seen.items()):
        print(f"  {name}: {count:,}")


if __name__ == "__main__":
    main()
