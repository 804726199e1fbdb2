"""The rows of `kvrag bench codec` as tables of at most 100 columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from kvrag.cli import console
from kvrag_bench.codec.baselines import CACHEGEN_PUBLIC
from kvrag_bench.codec.rows import BASELINE, CODER, CONTEXT, DESIGN, EQUAL, PRESET

if TYPE_CHECKING:
    from rich.table import Table

    from kvrag_bench.codec.rows import CodecRow


def print_rows(rows: Sequence[CodecRow]) -> None:
    """Print a table for each part and source."""
    for part, show in (
        (PRESET, _presets),
        (EQUAL, _equal),
        (DESIGN, _designs),
        (CODER, _coders),
        (CONTEXT, _contexts),
    ):
        # Baselines stand among the codecs.
        mine = [row for row in rows if row.part == part or (part, row.part) == (PRESET, BASELINE)]
        # The loads of coders are rows of one table.
        sources = dict.fromkeys("" if part == CODER else row.source for row in mine)
        for source in sources:
            show([row for row in mine if source in ("", row.source)])
            console.out().print()


def _presets(rows: Sequence[CodecRow]) -> None:
    lengths = sorted({row.num_tokens for row in rows if row.num_tokens})
    columns = [
        *(f"bits, {length}" for length in lengths),
        "entropy",
        "B/token",
        "error",
        "balanced",
    ]
    table = _table(f"{rows[0].source}: codecs and baselines", "codec", columns)
    for name in dict.fromkeys(row.name for row in rows):
        by_length = {row.num_tokens: row for row in rows if row.name == name}
        last = by_length[lengths[-1]]
        table.add_row(
            name,
            *(f"{by_length[length].bits_per_element:.3f}" for length in lengths),
            _number(last.entropy_bits, ".3f"),
            _number(last.bytes_per_token, ",.0f"),
            _error(last.relative_error),
            _error(last.balanced_error),
        )
    console.out().print(table)
    _dim(f"Bits an element of whole records, by tokens of a chunk; the rest at {lengths[-1]}.")
    _dim("Error: squared, over the variance; balanced: each layer and kind alike; /n: n planes.")


def _equal(rows: Sequence[CodecRow]) -> None:
    columns = ["error", "tokens", "bits", "CacheGen's", "8-bit's", "balanced: bits", "CacheGen's"]
    table = _table(f"{rows[0].source}: times smaller at equal error", "codec", columns)
    places = dict.fromkeys((row.preset, row.num_tokens) for row in rows)
    for preset, num_tokens in places:
        mine = [row for row in rows if (row.preset, row.num_tokens) == (preset, num_tokens)]
        plain = _by_error((row.relative_error, row) for row in mine)
        balanced = _by_error((row.balanced_error, row) for row in mine)
        for error in sorted(set(plain) | set(balanced)):
            first, second = plain.get(error, {}), balanced.get(error, {})
            table.add_row(
                preset,
                _error(error),
                f"{num_tokens}",
                _bits(first),
                *(_ratio(first.get(name)) for name in (CACHEGEN_PUBLIC, "8-bit")),
                _bits(second),
                _ratio(second.get(CACHEGEN_PUBLIC)),
            )
    console.out().print(table)
    _dim("8-bit is counted at its own size wherever its error is smaller.")


def _designs(rows: Sequence[CodecRow]) -> None:
    errors = sorted({row.relative_error for row in rows if row.relative_error})
    columns = [text for error in errors for text in (f"bits at {error:g}", "x")]
    title = f"{rows[0].source}: designs at equal error, chunks of {rows[0].num_tokens} tokens"
    table = _table(title, "design", columns)
    for preset in dict.fromkeys(row.preset for row in rows):
        found = {row.relative_error: row for row in rows if row.preset == preset}
        cells = []
        for error in errors:
            row = found.get(error)
            cells += [
                _number(row.bits_per_element if row else None, ".3f"),
                _number(1 / row.ratio if row and row.ratio else None, ".2f"),
            ]
        table.add_row(preset, *cells)
    console.out().print(table)
    _dim(f"x: bits over those of '{rows[0].baseline}'.")


def _coders(rows: Sequence[CodecRow]) -> None:
    columns = ["threads", "bits", "entropy", "encode", "decode", "ratio"]
    table = _table("entropy coders", "symbols", ["coder", *columns])
    for row in rows:
        table.add_row(
            row.source,
            f"{row.preset} {row.level}",
            f"{row.threads}",
            _number(row.bits_per_element, ".3f"),
            _number(row.entropy_bits, ".3f"),
            _number(row.encode_symbols_per_second, ",.0f", 1e-6),
            _number(row.decode_symbols_per_second, ",.0f", 1e-6),
            _ratio(row),
        )
    console.out().print(table)
    _dim("Million symbols a second. Ratio: of decoding, two threads over one; for other coders")
    _dim("kvrag's fastest on one thread over them.")


def _contexts(rows: Sequence[CodecRow]) -> None:
    first = rows[0]
    columns = ["bits", "whole", "entropy decode", "the rest", "of prefill"]
    title = f"{first.source}: {first.num_tokens:,} tokens into the buffer, {first.threads} thread"
    table = _table(title + ("s" if first.threads != 1 else ""), "codec", columns)
    for row in rows:
        table.add_row(
            row.name,
            _number(row.bits_per_element, ".3f"),
            *(
                "" if seconds is None else console.format_seconds(seconds)
                for seconds in (row.seconds, row.entropy_seconds, row.transform_seconds)
            ),
            _number(row.ratio, ".2%"),
        )
    console.out().print(table)


def _by_error(
    pairs: Iterable[tuple[float | None, CodecRow]],
) -> dict[float, dict[str | None, CodecRow]]:
    found: dict[float, dict[str | None, CodecRow]] = {}
    for error, row in pairs:
        if error is not None:
            found.setdefault(error, {})[row.baseline] = row
    return found


def _table(title: str, first: str, columns: Sequence[str]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", title_justify="left", title=title)
    table.add_column(first, no_wrap=True)
    for name in columns:
        table.add_column(name, justify="left" if name == "coder" else "right", no_wrap=True)
    return table


def _bits(found: dict[str | None, CodecRow]) -> str:
    return next((_number(row.bits_per_element, ".3f") for row in found.values()), "")


def _ratio(row: CodecRow | None) -> str:
    return "" if row is None or row.ratio is None else f"{row.ratio:.2f}x"


def _error(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.1e}" if 0 < value < 1e-3 else f"{value:.4f}"


def _number(value: float | None, form: str, factor: float = 1.0) -> str:
    return "" if value is None else format(value * factor, form)


def _dim(text: str) -> None:
    console.out().print(text, style="dim", markup=False)
