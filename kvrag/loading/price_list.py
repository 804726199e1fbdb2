"""The prices of stores: a table that users edit."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from kvrag.arguments import shown
from kvrag.errors import ParameterError
from kvrag.regularfile import read_regular

FILE_NAME = "prices.toml"

EXAMPLES = """\
# What stores cost, in one currency. THESE ARE EXAMPLES: rounded list prices, in US dollars, of
# the kind that large providers publish for one region. Yours differ: edit them.
#
# A name is what a store's URL begins with; of several that fit, the longest counts.
#   gb_month         keeping a gigabyte (10^9 bytes) for a month
#   gb_read          reading a gigabyte: transfer, where it is charged
#   thousand_reads   a thousand requests; a chunk takes one for its header and one for each layer

["file:"]
gb_month = 0.08

["memory:"]
gb_month = 3.0

["redis:"]
gb_month = 10.0

["rediss:"]
gb_month = 10.0

["unix:"]
gb_month = 10.0

["s3:"]
gb_month = 0.023
thousand_reads = 0.0004

["gs:"]
gb_month = 0.020
thousand_reads = 0.0004

["az:"]
gb_month = 0.018
thousand_reads = 0.0005

["http:"]
gb_month = 0.08

["https:"]
gb_month = 0.08
gb_read = 0.09
"""


@dataclass(frozen=True)
class Price:
    """The prices of a store, in one currency.

    Attributes
    ----------
    gb_month
        Keeping 10^9 bytes for a month.
    gb_read
        Reading 10^9 bytes.
    thousand_reads
        A thousand requests.
    """

    gb_month: float = 0.0
    gb_read: float = 0.0
    thousand_reads: float = 0.0

    def month(self, size_bytes: int, num_requests: int, reads: float) -> float:
        """Return the cost of a month.

        Parameters
        ----------
        size_bytes
            Bytes that are kept.
        num_requests
            Requests that it takes to read all of them once.
        reads
            How often all of them are read in a month.
        """
        size = size_bytes / 1e9
        requests = num_requests * self.thousand_reads / 1000
        return size * self.gb_month + reads * (size * self.gb_read + requests)


class PriceTable(NamedTuple):
    """Prices by the beginnings of URLs, and the file that they come from."""

    prices: Mapping[str, Price]
    where: str

    def of(self, url: str) -> Price:
        """Return the price of a store. Raises ParameterError if the table lacks it."""
        fitting = [name for name in self.prices if url.startswith(name)]
        if not fitting:
            raise ParameterError(
                f"{self.where} has no price of {url}: give one under a name that the URL begins "
                "with"
            )
        return self.prices[max(fitting, key=len)]


def parse_prices(text: str, where: str) -> PriceTable:
    """Return a price table.

    Raises
    ------
    ParameterError
        If the text is not such a table. Messages call it `where`.
    """
    known = [field.name for field in fields(Price)]
    try:
        table: dict[str, Any] = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ParameterError(f"{where}: not a table of prices: {error}") from error
    prices = {}
    for name, entries in table.items():
        if not isinstance(entries, dict) or not entries or entries.keys() - set(known):
            raise ParameterError(
                f'{where}: expected ["{name}"] with some of {", ".join(known)}; found '
                f"{shown(entries)}"
            )
        for what, price in entries.items():
            is_number = isinstance(price, int | float) and not isinstance(price, bool)
            if not is_number or not 0.0 <= price <= sys.float_info.max:
                raise ParameterError(
                    f"{where}: expected a finite {what} of {name!r}, 0 or more; found "
                    f"{shown(price)}"
                )
        prices[name] = Price(**entries)
    return PriceTable(prices, where)


def read_prices(path: Path) -> PriceTable:
    """Return the price table in a file. Raises ParameterError as `parse_prices` does."""
    try:
        text = read_regular(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ParameterError(f"{path}: the table of prices cannot be read: {error}") from error
    return parse_prices(text, str(path))
