"""Draw the pictures of `docs/explanation/how-it-works.md`: ``python -m tools.drawings [FOLDER]``.

Nothing in them is measured: they show which rows are stored, moved and computed.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "explanation"

_INK, _GREY, _FRESH = "#1e293b", "#64748b", "#e2e8f0"
# The chunks, and the kinds of rows: told apart by lightness too.
_CHUNKS = {"A": "#93c5fd", "B": "#fcd34d", "C": "#a7d8b9"}
_REUSED, _AGAIN, _LINK = "#bfdbfe", "#f97316", "#7c3aed"
_LAYERS = 6


def draw_chunks() -> Figure:
    """Return chunks that are computed once and placed differently in two prompts."""
    figure, axes = _canvas(5.4, 58)
    for x, title in (
        (2, "Chunks of documents"),
        (27, "KV without positions"),
        (58, "Two prompts"),
    ):
        axes.text(x, 55.5, title, weight="bold", fontsize=12, color=_INK)
    stored = {}
    for (name, colour), y in zip(_CHUNKS.items(), (33, 22, 11), strict=True):
        _box(axes, 2, y, 14, 7, colour, f"chunk {name}")
        _arrow(axes, (16.5, y + 3.5), (26.5, y + 3.5), _GREY)
        _box(axes, 27, y, 18, 7, colour, f"keys, values of {name}")
        stored[name] = y + 3.5
    axes.text(21.5, 44.5, "read once\nby the model", ha="center", va="center", color=_GREY)
    _prompt(axes, 42, ("B", "A"), stored, above=True)
    _prompt(axes, 4.5, ("A", "C", "B"), stored, above=False)
    axes.text(
        *(87, 27),
        "keys are turned\nto the positions of their place",
        ha="center",
        va="center",
        color=_GREY,
    )
    return figure


def _prompt(
    axes: Axes, y: float, names: tuple[str, ...], stored: dict[str, float], above: bool
) -> None:
    x = 58.0
    for name, width in (("text", 5.5), *((name, 8.5) for name in names), ("question", 9.0)):
        colour = _CHUNKS.get(name, _FRESH)
        axes.add_patch(Rectangle((x, y), width, 6, facecolor=colour, edgecolor="white", lw=2))
        axes.text(x + width / 2, y + 3, name, ha="center", va="center", color=_INK)
        if name in stored:
            start, end = (45.5, stored[name]), (x + width / 2, y - 0.4 if above else y + 6.4)
            _arrow(axes, start, end, colour, width=2)
        x += width
    line = y + 7.4 if above else y - 1.4
    axes.annotate("", (x, line), (58, line), arrowprops={"arrowstyle": "->", "color": _GREY})
    middle = line + 1.9 if above else line - 1.9
    axes.text(58, middle, "position 0, 1, 2 ...", va="center", color=_GREY, fontsize=9.5)


def draw_layers() -> Figure:
    """Return which rows of a prompt are computed, and loading beside computing."""
    figure, (rows, time) = plt.subplots(
        2, 1, figsize=(10, 6.4), height_ratios=(1.45, 1), layout="constrained"
    )
    chunk_a = (*"rrRrrrrRrr", "l")
    chunk_b = (*"rRrrrRRrr", "l")
    tokens = [*"fff", *chunk_a, *chunk_b, *"fffff"]
    colours = {"f": "#94a3b8", "r": _REUSED, "R": _AGAIN, "l": _LINK}
    for column, kind in enumerate(tokens):
        for layer in range(_LAYERS):
            cell = (column + 0.06, layer + 0.06)
            rows.add_patch(Rectangle(cell, 0.88, 0.88, facecolor=colours[kind], edgecolor="none"))
    begin = 0
    for name, part in (
        ("text", "fff"),
        ("chunk A", chunk_a),
        ("chunk B", chunk_b),
        ("question", "fffff"),
    ):
        middle = begin + len(part) / 2
        rows.text(middle, -0.5, name, ha="center", va="top", fontsize=11, color=_INK)
        begin += len(part)
    rows.set_title(
        "Each column is a token of the prompt, each row a layer",
        fontsize=12,
        weight="bold",
        color=_INK,
        loc="left",
    )
    for layer in range(_LAYERS):
        rows.text(-0.3, layer + 0.5, str(layer + 1), ha="right", va="center", color=_GREY)
    names = {
        "r": "reused: loaded from the index",
        "R": "recomputed",
        "l": "link tokens, where trained",
        "f": "fresh",
    }
    rows.legend(
        [Rectangle((0, 0), 1, 1, facecolor=colours[kind]) for kind in names],
        list(names.values()),
        **{"loc": "upper center", "bbox_to_anchor": (0.5, 0.02), "ncols": 4, "frameon": False},
    )
    rows.set(xlim=(-1, len(tokens)), ylim=(-1.2, _LAYERS + 0.1))
    _timeline(time)
    for axes in (rows, time):
        axes.axis("off")
    return figure


def _timeline(axes: Axes) -> None:
    axes.set_title(
        "Layers are loaded while others are computed",
        fontsize=12,
        weight="bold",
        color=_INK,
        loc="left",
    )
    load, compute = 0.8, 1.6
    lanes = (("load", 1.25, _REUSED), ("compute", 0.0, _AGAIN))
    for name, y, _ in lanes:
        axes.text(-0.15, y + 0.45, name, ha="right", va="center", color=_INK, fontsize=11)
    for layer in range(_LAYERS):
        for (_, y, colour), begin, length in zip(
            lanes, (layer * load, load + layer * compute), (load, compute), strict=True
        ):
            axes.add_patch(
                Rectangle((begin, y), length, 0.9, facecolor=colour, edgecolor="white", lw=2)
            )
            axes.text(
                begin + length / 2, y + 0.45, str(layer + 1), ha="center", va="center", color=_INK
            )
    end = load + _LAYERS * compute
    axes.text(
        _LAYERS * load + 0.2,
        1.7,
        "layers 2 to 6 cost no time",
        va="center",
        color=_GREY,
    )
    axes.annotate("", (end + 0.4, -0.3), (0, -0.3), arrowprops={"arrowstyle": "->", "color": _GREY})
    axes.text(end + 0.4, -0.72, "time", ha="right", va="center", color=_GREY)
    axes.plot([end, end], [-0.3, 1.0], color=_INK, lw=1.5)
    axes.text(end + 0.1, 1.25, "first\ntoken", ha="center", va="bottom", color=_INK)
    axes.set(xlim=(-1.2, end + 0.7), ylim=(-1, 2.3))


def _canvas(height: float, top: float) -> tuple[Figure, Axes]:
    figure, axes = plt.subplots(figsize=(10, height), layout="constrained")
    axes.set(xlim=(0, 100), ylim=(0, top))
    axes.axis("off")
    return figure, axes


def _box(
    axes: Axes, x: float, y: float, width: float, height: float, colour: str, text: str
) -> None:
    shape = FancyBboxPatch(
        *((x, y), width, height),
        boxstyle="round,pad=0,rounding_size=1.2",
        facecolor=colour,
        edgecolor=_INK,
        lw=0.8,
    )
    axes.add_patch(shape)
    axes.text(
        x + width / 2, y + height / 2, text, ha="center", va="center", color=_INK, fontsize=11
    )


def _arrow(
    axes: Axes,
    start: tuple[float, float],
    end: tuple[float, float],
    colour: str,
    width: float = 1.2,
) -> None:
    axes.add_patch(
        FancyArrowPatch(
            *(start, end),
            arrowstyle="-|>",
            mutation_scale=12,
            color=colour,
            lw=width,
        )
    )


PICTURES = {"placing.svg": draw_chunks, "layers.svg": draw_layers}


def main(folder: Path) -> None:
    for name, draw in PICTURES.items():
        # Text stays text, the page may be dark, and the same code gives the same file.
        with plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": "kvrag", "font.size": 10.5}):
            figure = draw()
            figure.savefig(folder / name, facecolor="white", metadata={"Date": None})
        plt.close(figure)
        print(folder / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
