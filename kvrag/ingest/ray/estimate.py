"""What an ingestion will take: bytes with each codec, and time and money at a given rate."""

from __future__ import annotations

from dataclasses import dataclass

from kvrag.codec.names import LEVELS, RAW, expected_bytes_per_token, parse_codec
from kvrag.ingest.config import DTYPE_BYTES, IndexConfig


@dataclass(frozen=True)
class Estimate:
    """What an ingestion will take.

    Attributes
    ----------
    num_tokens
        Tokens to compute: the chunks, and what each is encoded after.
    size_bytes
        Bytes of the records by codec; rather too many than too few.
    hours
        Wall time; None without a rate.
    price
        Money, in the currency of the given price; None without a rate or a price.
    """

    num_tokens: int
    size_bytes: dict[str, int]
    hours: float | None
    price: float | None


def estimate(
    num_tokens: int,
    num_context_tokens: int,
    config: IndexConfig,
    *,
    num_actors: int,
    rate: float | None,
    price_per_hour: float | None,
) -> Estimate:
    """Return what computing some tokens will take.

    Parameters
    ----------
    num_tokens, num_context_tokens
        Tokens of the records to make, and of what is computed before them but not stored.
    config
        The settings of the index.
    num_actors
        Processes that compute at once.
    rate
        Tokens that one of them computes in a second.
    price_per_hour
        What one of them costs in an hour.
    """
    names = [RAW] + [
        parse_codec(preset if len(levels) == 1 else f"{preset}:{level}").label
        for preset, levels in LEVELS.items()
        for level in levels
    ]
    size = DTYPE_BYTES[config.dtype]
    sizes = {
        name: num_tokens * expected_bytes_per_token(name, config.bytes_per_token, size)
        for name in names
    }
    computed = num_tokens + num_context_tokens
    hours = None if rate is None else computed / rate / num_actors / 3600
    price = None if hours is None or price_per_hour is None else hours * num_actors * price_per_hour
    return Estimate(computed, sizes, hours, price)
