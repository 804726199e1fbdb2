"""Results over releases, as one SVG for speed and one for quality."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from kvrag_bench.regress.results import Results

_COLUMNS = 3


def draw_releases(releases: Sequence[Results], folder: Path) -> list[Path]:
    """Write ``releases-speed.svg`` and ``releases-quality.svg`` into a folder.

    Each figure of the newest release has a panel, with a point for each release that has it.

    Parameters
    ----------
    releases
        At least one, the oldest first.
    folder
        Must exist.

    Returns
    -------
    list of Path
        What was written.
    """
    groups = dict.fromkeys(entry.group for entry in releases[-1].entries)
    return [_draw(releases, group, folder / f"releases-{group}.svg") for group in groups]


def _draw(releases: Sequence[Results], group: str, path: Path) -> Path:
    shown = [entry for entry in releases[-1].entries if entry.group == group]
    rows = -(-len(shown) // _COLUMNS)
    figure, axes = plt.subplots(rows, _COLUMNS, figsize=(11, 2.5 * rows), squeeze=False)
    panels = list(axes.flat)
    for panel, wanted in zip(panels, shown, strict=False):
        found = [
            (release.version, entry)
            for release in releases
            for entry in release.entries
            if entry.name == wanted.name
        ]
        values = [entry.value for _, entry in found]
        bars = [entry.interval for _, entry in found]
        below = [value - low for value, (low, _) in zip(values, bars, strict=True)]
        above = [high - value for value, (_, high) in zip(values, bars, strict=True)]
        names = [version for version, _ in found]
        panel.errorbar(names, values, (below, above), fmt="o-", markersize=4, capsize=3, lw=1)
        panel.set_title(wanted.name, fontsize=9)
        arrow = "more" if wanted.is_more_better else "less"
        panel.set_ylabel(f"{wanted.unit}\n({arrow} is better)", fontsize=7)
        panel.tick_params(labelsize=7)
        panel.set_ylim(bottom=min(0.0, *(low for low, _ in bars)))
        panel.margins(x=0.3)
        panel.grid(axis="y", alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    for panel in panels[len(shown) :]:
        panel.set_visible(False)
    figure.tight_layout()
    # The same results give the same file.
    with plt.rc_context({"svg.hashsalt": "kvrag"}):
        figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return path
