"""Draw the results of all releases, in `bench/releases/`, for `docs/results/releases.md`.

``python -m tools.releases`` writes a picture of speed and one of quality. `kvrag bench regress
--save VERSION` writes the results of a release.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from kvrag_bench.regress.results import QUALITY, SPEED, Results, read_releases

ROOT = Path(__file__).resolve().parent.parent
RELEASES = ROOT / "bench" / "releases"
PICTURES = {
    group: ROOT / "docs" / "results" / f"releases-{group}.svg" for group in (SPEED, QUALITY)
}
_COLUMNS = 3


def draw(releases: Sequence[Results], group: str, path: Path) -> None:
    """Draw a panel for each figure that the newest release has, with a point for each release."""
    shown = [entry for entry in releases[-1].entries if entry.group == group]
    rows = -(-len(shown) // _COLUMNS)
    figure, axes = plt.subplots(
        rows, _COLUMNS, figsize=(10, 2.3 * rows), squeeze=False, layout="constrained"
    )
    for panel in axes.flat[len(shown) :]:
        panel.set_visible(False)
    for panel, wanted in zip(axes.flat, shown, strict=False):
        found = [
            (release.version, entry.value, *entry.interval)
            for release in releases
            for entry in release.entries
            if entry.name == wanted.name
        ]
        versions, values, lows, highs = zip(*found, strict=True)
        panel.plot(versions, values, "o-")
        panel.vlines(versions, lows, highs)
        panel.set_title(wanted.name, fontsize=9)
        panel.set_ylabel(wanted.unit, fontsize=7)
        panel.set_ylim(bottom=0, top=1.2 * max(highs))
        panel.margins(x=0.3)
        panel.tick_params(labelsize=7)
        panel.spines[["top", "right"]].set_visible(False)
    # Text stays text, and the same results give the same file.
    with plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": "kvrag"}):
        figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    releases = read_releases(RELEASES)
    for group, path in PICTURES.items():
        draw(releases, group, path)
        print(path)


if __name__ == "__main__":
    main()
