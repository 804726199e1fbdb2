"""An inspection as three PNGs: deviation with picks, attention, and layer statistics."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import PowerNorm

from kvrag_bench.inspection.measure import Inspection

_COLORS = ("tab:orange", "tab:blue", "tab:green", "tab:purple", "tab:red")


def draw_inspection(found: Inspection, folder: Path) -> list[Path]:
    """Write ``deviation.png``, ``attention.png`` and ``layers.png`` into a folder.

    Returns
    -------
    list of Path
        What was written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.png" for name in ("deviation", "attention", "layers")]
    _draw_deviation(found, paths[0])
    _draw_attention(found, paths[1])
    _draw_layers(found, paths[2])
    return paths


def _draw_deviation(found: Inspection, path: Path) -> None:
    heights = [1, 1, 0.18 * (len(found.picked) + 1)] if found.picked else [1, 1]
    figure, axes = plt.subplots(
        len(heights), 1, figsize=(13, 6.5), sharex=True, height_ratios=heights
    )
    for panel, name, values in (
        (axes[0], "keys", found.key_deviation),
        (axes[1], "values", found.value_deviation),
    ):
        grid = np.asarray(values)
        image = panel.imshow(
            grid, aspect="auto", interpolation="nearest", cmap="magma_r", norm=PowerNorm(0.5, 0.0)
        )
        figure.colorbar(image, ax=panel, label="distance / length", pad=0.01)
        panel.set_ylabel("layer")
        panel.set_yticks(range(len(grid)))
        panel.set_title(f"stored {name} against full prefill", fontsize=10)
    if found.picked:
        panel = axes[2]
        for place, rows in enumerate(found.picked.values()):
            color = _COLORS[place % len(_COLORS)]
            panel.plot(rows, [place] * len(rows), "|", ms=11, mew=2, color=color)
        panel.set_yticks(range(len(found.picked)), list(found.picked))
        panel.set_ylim(len(found.picked) - 0.4, -0.6)
        panel.set_title("computed again", fontsize=10)
        # As wide as the panels above, which gave room to their colour bars.
        figure.colorbar(image, ax=panel, pad=0.01).ax.set_visible(False)
    for panel in axes:
        for begin, end in found.spans:
            panel.axvline(begin - 0.5, color="tab:green", lw=0.8)
            panel.axvline(end - 0.5, color="tab:green", lw=0.8, ls=":")
    axes[-1].set_xlabel("prompt token (green: where a chunk begins; dotted: where it ends)")
    figure.suptitle(_title(found))
    figure.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(figure)


def _draw_attention(found: Inspection, path: Path) -> None:
    grid = np.asarray(found.attention)
    figure, panel = plt.subplots(figsize=(1.1 * grid.shape[1] + 2.5, 0.5 * grid.shape[0] + 1.8))
    image = panel.imshow(grid, aspect="auto", cmap="Blues", vmin=0, vmax=1)
    for layer, row in enumerate(grid):
        for place, share in enumerate(row):
            color = "white" if share > 0.6 else "black"
            panel.text(place, layer, f"{share:.0%}", ha="center", va="center", color=color)
    names = [f"chunk {number}" for number in range(1, grid.shape[1])]
    panel.set_xticks(range(grid.shape[1]), [*names, "the rest"])
    panel.set_yticks(range(grid.shape[0]))
    panel.set_ylabel("layer")
    panel.set_title(f"attention of the question: {found.question}", fontsize=10, wrap=True)
    figure.colorbar(image, ax=panel, format=lambda share, _: f"{share:.0%}")
    figure.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(figure)


def _draw_layers(found: Inspection, path: Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8))
    correlations = found.rank_correlation
    present = [(place, value) for place, value in enumerate(correlations) if value is not None]
    left.bar([place for place, _ in present], [value for _, value in present], width=0.6)
    left.set_xticks(
        range(len(correlations)), [f"{i} and {i + 1}" for i in range(len(correlations))]
    )
    left.set_xlim(-0.5, len(correlations) - 0.5)
    left.set_ylim(min(0.0, *(value for _, value in present), 0.0), 1)
    left.set_xlabel("neighbouring layers")
    left.set_title("rank correlation of value deviation", fontsize=10)
    layers = range(len(found.key_delta_variance))
    right.plot(layers, found.key_delta_variance, "o-", label="keys")
    right.plot(layers, found.value_delta_variance, "s-", label="values")
    right.axhline(1, color="black", ls="--", lw=1, label="no gain from deltas")
    right.set_ylim(bottom=0)
    right.set_xticks(list(layers))
    right.set_xlabel("layer")
    right.set_title("variance of token deltas over variance of values", fontsize=10)
    right.legend(frameon=False)
    figure.suptitle(_title(found))
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _title(found: Inspection) -> str:
    return f"{len(found.tokens):,} tokens, {len(found.spans)} chunks: {found.question}"
