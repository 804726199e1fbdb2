"""The cheapest store that is fast enough, and the table that says what stores cost."""

from pathlib import Path

import pytest

from kvrag.errors import ParameterError
from kvrag.tune.stores import Offer, Price, choose_store, parse_prices, read_prices

FAST = Offer("file:/ssd", 0.002, 1.0, 80.0)
MIDDLE = Offer("redis://host/0", 0.005, 1.0, 900.0)
SLOW = Offer("s3://bucket", 0.2, 0.0, 20.0)


def test_the_cheapest_that_hides_is_taken() -> None:
    assert choose_store([FAST, MIDDLE, SLOW], 0.01, "none").chosen is FAST
    assert choose_store([FAST, MIDDLE, SLOW], 0.3, "none").chosen is SLOW
    found = choose_store([SLOW, MIDDLE], 0.01, "deviation(ratio=0.15)")
    assert found.chosen is MIDDLE
    assert "the cheapest of 1 that load a chunk within 10 ms" in found.reason
    assert "deviation(ratio=0.15)" in found.reason


def test_where_none_hides_the_fastest_is_taken() -> None:
    found = choose_store([SLOW, MIDDLE, FAST], 0.0, "none")
    assert found.chosen is FAST
    assert found.reason.startswith("the fastest: none loads a chunk within 0 ms")
    with pytest.raises(ParameterError, match="no store"):
        choose_store([], 1.0, "none")


def test_what_a_month_costs() -> None:
    price = Price(gb_month=0.02, gb_read=0.1, thousand_reads=0.5)
    # 2 GB kept; read thrice: 6 GB and 3,000 requests.
    assert price.month(2 * 10**9, 1000, 3) == pytest.approx(0.04 + 0.6 + 1.5)
    assert price.month(2 * 10**9, 1000, 0) == pytest.approx(0.04)


def test_the_longest_name_counts() -> None:
    prices = parse_prices('["s3:"]\ngb_month = 1\n["s3://cold/"]\ngb_month = 0.5\n', "x")
    assert prices.of("s3://cold/kv").gb_month == 0.5
    assert prices.of("s3://warm/kv").gb_month == 1
    with pytest.raises(ParameterError, match=r"x has no price of file:/a: give one"):
        prices.of("file:/a")


@pytest.mark.parametrize(
    "text",
    [
        "gb_month = 1",
        '["s3:"]\n',
        '["s3:"]\nper_month = 1',
        '["s3:"]\ngb_month = -1',
        '["s3:"]\ngb_month = nan',
        '["s3:"]\ngb_month = "a lot"',
        '["s3:"]\ngb_month = true',
        '["s3:"]\ngb_month = 1' + "0" * 400,
        '["s3:"]\ngb_month = 1' + "0" * 5000,
        "[",
        "\x00",
        '["s3:"]\ngb_month = ' + "[" * 100_000,
    ],
)
def test_tables_that_are_none(text: str) -> None:
    with pytest.raises(ParameterError, match=r"^prices.toml: "):
        parse_prices(text, "prices.toml")


def test_a_table_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="cannot be read"):
        read_prices(tmp_path / "absent.toml")
    (tmp_path / "latin.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ParameterError, match="cannot be read"):
        read_prices(tmp_path / "latin.toml")
