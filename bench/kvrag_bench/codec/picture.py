"""Rate-distortion curves as a picture: error over bits, a panel for each source."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from kvrag.errors import ParameterError
from kvrag_bench.codec.baselines import CACHEGEN_PUBLIC, EIGHT_BIT
from kvrag_bench.codec.curves import TARGETS
from kvrag_bench.codec.rows import BASELINE, DESIGN, PRESET, CodecRow

_COLORS = {
    "transform": "tab:blue",
    "cachegen": "tab:green",
    CACHEGEN_PUBLIC: "tab:orange",
    f"{CACHEGEN_PUBLIC}-16": "tab:red",
    EIGHT_BIT: "tab:gray",
}
_TICKS = (0.1, 0.2, 0.3, 0.5, 1, 2, 3, 4, 6, 8, 12)
_LEAST_ERROR = 3e-5
_MOST_ERROR = 0.5


def draw_codecs(rows: Sequence[CodecRow], path: Path) -> None:
    """Draw rows into a PNG: codecs on chunks of the greatest length, or else designs.

    Parameters
    ----------
    rows
        Those of other parts are passed over.
    path
        File to write.

    Raises
    ------
    ParameterError
        When no row has both a rate and an error.
    """
    drawn = [row for row in rows if row.part in (PRESET, BASELINE) and row.relative_error]
    drawn = drawn or [row for row in rows if row.part == DESIGN]
    sources = list(dict.fromkeys(row.source for row in drawn))
    if not sources:
        raise ParameterError("nothing to draw: --out needs part 'rate' or 'designs'")
    figure, axes = plt.subplots(
        1, len(sources), figsize=(5.4 * len(sources) + 0.4, 4.9), squeeze=False
    )
    for panel, source in zip(axes.flat, sources, strict=True):
        mine = [row for row in drawn if row.source == source]
        longest = max(row.num_tokens or 0 for row in mine)
        _draw_source(panel, [row for row in mine if row.num_tokens == longest])
        panel.set_title(f"{source}, chunks of {longest} tokens", fontsize=10)
    axes.flat[0].set_ylabel("relative squared error (lower is better)")
    handles: dict[str, Any] = {}
    for panel in axes.flat:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    columns = min(len(handles), 3 * len(sources))
    lines = -(-len(handles) // columns)
    figure.suptitle("What a codec takes and loses (whole records)", fontsize=11)
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="lower center",
        ncols=columns,
        frameon=False,
        fontsize=8,
    )
    figure.tight_layout(rect=(0, 0.05 * lines + 0.01, 1, 1))
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _draw_source(panel: Any, rows: Sequence[CodecRow]) -> None:
    for error in TARGETS:
        panel.axhline(error, color="black", alpha=0.25, lw=0.8, linestyle=":")
    for preset in dict.fromkeys(row.preset for row in rows):
        mine = [row for row in rows if row.preset == preset]
        color = _COLORS.get(preset)
        whole = _line([row for row in mine if "/" not in (row.level or "")])
        panel.plot(*whole, "o-", color=color, label=preset, markersize=4, lw=1.5)
        cut = _line([row for row in mine if "/" in (row.level or "")])
        if cut[0]:
            panel.plot(
                *cut, "x", color=color, label=f"{preset}, cut after a plane", markersize=5, lw=0
            )
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_ylim(_LEAST_ERROR, _MOST_ERROR)
    panel.set_xlim(_TICKS[0], _TICKS[-1])
    panel.xaxis.set_major_locator(FixedLocator(_TICKS))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_formatter(FuncFormatter(lambda bits, _: f"{bits:g}"))
    panel.set_xlabel("bits per element, everything counted")
    panel.grid(alpha=0.2)
    panel.spines[["top", "right"]].set_visible(False)


def _line(rows: Sequence[CodecRow]) -> tuple[list[float], list[float]]:
    points = sorted(
        (row.bits_per_element, row.relative_error)
        for row in rows
        if row.bits_per_element and row.relative_error
    )
    return [bits for bits, _ in points], [error for _, error in points]
