"""The rows of `kvrag bench peers` as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from kvrag_bench.peers.run import PeerRow
from kvrag_bench.peers.workload import VISITS

_COLORS = ("tab:green", "tab:blue", "silver")


def draw_peers(rows: Sequence[PeerRow], path: Path) -> None:
    """Draw seconds to the first token, a group of bars a tool, as a PNG.

    Parameters
    ----------
    rows
        Those that failed are left out.
    path
        File to write.
    """
    measured = [row for row in rows if not row.failure]
    height = 0.8 / len(VISITS)
    figure, axes = plt.subplots(figsize=(8, 0.6 * len(measured) + 1.2), layout="constrained")
    for number, (visit, color) in enumerate(zip(VISITS, _COLORS, strict=True)):
        places = [place + number * height for place in range(len(measured))]
        seconds = [row.ttft_seconds[visit] for row in measured]
        bars = axes.barh(places, seconds, height, label=visit, color=color)
        axes.bar_label(bars, [f" {one:.2f} s" for one in seconds], fontsize=7)
    axes.set_yticks(
        [place + height for place in range(len(measured))], [row.name for row in measured]
    )
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("seconds to the first token (less is better)")
    figure.legend(loc="outside upper center", ncols=len(VISITS), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
