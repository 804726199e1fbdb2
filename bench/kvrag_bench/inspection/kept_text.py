"""What eviction keeps, as one PNG: the prompt's own text, as dark as it is kept, and every head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Rectangle

from kvrag_bench.inspection.eviction import EvictionInspection

_LINE_CHARACTERS = 110
_LINE_INCHES = 0.23
_COLOURS = "YlGnBu"


def draw_eviction(found: EvictionInspection, path: Path) -> None:
    """Write the picture: above, the text; below, for each head of each layer the tokens it holds.

    A token's shade is the share of heads that hold it: white is gone from all, dark is in all.
    """
    lines = _lines(found.tokens)
    num_heads = sum(len(layer) for layer in found.kept)
    text_inches = _LINE_INCHES * (len(lines) + 1)
    heads_inches = min(8.0, max(2.0, 0.16 * num_heads))
    figure, (text, heads) = plt.subplots(
        2,
        1,
        figsize=(13, text_inches + heads_inches + 1.4),
        height_ratios=[text_inches, heads_inches],
        layout="constrained",
    )
    _draw_text(text, lines, found)
    _draw_heads(heads, found)
    share = f"{np.mean(found.shares):.0%} of {len(found.tokens):,} prompt tokens"
    shown = f"{found.policy} keeps {share}"
    figure.suptitle(
        f"{shown}\nanswer {_literal(found.answer)!r}, with the full cache "
        f"{_literal(found.full_answer)!r}",
        fontsize=11,
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _lines(tokens: tuple[str, ...]) -> list[list[tuple[int, str]]]:
    """Return the tokens line by line with their numbers, wrapped as text."""
    lines: list[list[tuple[int, str]]] = [[]]
    width = 0
    for number, token in enumerate(tokens):
        shown = token.replace("\n", "⏎") or "·"
        if width + len(shown) > _LINE_CHARACTERS and lines[-1]:
            lines.append([])
            width = 0
        lines[-1].append((number, shown))
        width += len(shown)
        if "\n" in token:
            lines.append([])
            width = 0
    return [line for line in lines if line]


def _draw_text(panel: Any, lines: list[list[tuple[int, str]]], found: EvictionInspection) -> None:
    colours, shares = matplotlib.colormaps[_COLOURS], found.shares
    panel.set_xlim(0, _LINE_CHARACTERS)
    panel.set_ylim(len(lines), 0)
    panel.axis("off")
    for row, line in enumerate(lines):
        column = 0.0
        for number, shown in line:
            share = shares[number]
            panel.add_patch(
                Rectangle((column, row + 0.06), len(shown), 0.88, color=colours(share), lw=0)
            )
            colour = "white" if share > 0.6 else "black"
            # Letter by letter, so that no font's width moves a token off its shade.
            for place, letter in enumerate(shown):
                panel.text(
                    column + place + 0.5,
                    row + 0.55,
                    _literal(letter),
                    ha="center",
                    va="center",
                    family="monospace",
                    fontsize=8.5,
                    color=colour,
                )
            column += len(shown)


def _draw_heads(panel: Any, found: EvictionInspection) -> None:
    heads = [head for layer in found.kept for head in layer]
    grid = np.zeros((len(heads), len(found.tokens)))
    for row, head in enumerate(heads):
        grid[row, list(head)] = 1
    panel.imshow(grid, aspect="auto", interpolation="nearest", cmap=_COLOURS, vmin=0, vmax=1.3)
    per_layer = len(found.kept[0])
    for layer in range(1, len(found.kept)):
        panel.axhline(layer * per_layer - 0.5, color="tab:red", lw=0.8)
    panel.set_yticks(
        [layer * per_layer + (per_layer - 1) / 2 for layer in range(len(found.kept))],
        [
            f"layer {number}: {np.mean([len(head) for head in layer]) / len(found.tokens):.0%}"
            for number, layer in enumerate(found.kept)
        ],
        fontsize=8,
    )
    panel.set_xlabel("prompt token (a row a key head; dark: held)")


def _literal(text: str) -> str:
    """Return text that matplotlib does not take for a formula."""
    return text.replace("$", r"\$")
