"""The referee's rows as a picture: quality against recomputation, and against stored bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter, PercentFormatter

from kvrag.errors import ParameterError
from kvrag_bench.quality.contest import LINKED
from kvrag_bench.quality.rows import OVERALL, QualityRow

_NONE = "none"
_COLORS = {
    "none": "tab:gray",
    "random": "silver",
    "boundary": "tab:orange",
    "seam": "gold",
    "deviation": "tab:blue",
    "gradual": "tab:cyan",
    "query": "tab:green",
    "two_stage": "tab:red",
    "oracle": "black",
}
_SPARE_COLORS = ("tab:purple", "tab:brown", "tab:pink", "tab:olive")
_LINES = ("-", "--", ":", "-.")
_PANELS_A_LINE = 4


def check_picture_path(path: Path) -> None:
    """Raise ParameterError unless a PNG can be written to `path`."""
    if path.suffix.lower() != ".png":
        raise ParameterError(f"picture {path}: expected a name that ends in .png")
    if not path.parent.is_dir():
        raise ParameterError(f"picture {path}: there is no folder {path.parent}")


def draw_quality(rows: Sequence[QualityRow], path: Path) -> None:
    """Draw exact match over recomputed share, a panel a question type, into a PNG.

    Bars are the 95 % paired bootstrap intervals of the difference to full prefill, which is the
    dashed line. With several codecs a last panel shows exact match over bytes a token.

    Parameters
    ----------
    rows
        At least one.
    path
        File to write.
    """
    kinds = list(dict.fromkeys(row.question_type for row in rows))
    codecs = list(dict.fromkeys(row.codec for row in rows))
    num_panels = len(kinds) + (len(codecs) > 1)
    columns = min(_PANELS_A_LINE, num_panels)
    lines = -(-num_panels // columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(3.6 * columns + 0.6, 3.3 * lines + 1.1), squeeze=False
    )
    panels = list(axes.flat)
    low, high = _limits(rows)
    for panel, kind in zip(panels, kinds, strict=False):
        of_kind = [row for row in rows if row.question_type == kind]
        _draw_recompute(panel, of_kind, codecs)
        panel.set_ylim(low, high)
    if len(codecs) > 1:
        _draw_bytes(panels[len(kinds)], [row for row in rows if row.question_type == OVERALL])
        panels[len(kinds)].set_ylim(low, high)
    for panel in panels[num_panels:]:
        panel.set_visible(False)
    for number, panel in enumerate(panels[:num_panels]):
        panel.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
        if number % columns == 0:
            panel.set_ylabel("exact match")
    handles: dict[str, Any] = {}
    for panel in panels[:num_panels]:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    first = rows[0]
    figure.suptitle(
        f"{first.model} on {first.dataset}, {first.num_questions:,} questions: reuse against "
        "full prefill (bars: 95 % of paired resamples)",
        fontsize=11,
    )
    figure.legend(
        handles.values(), handles.keys(), loc="lower center", ncols=len(handles), frameon=False
    )
    figure.tight_layout(rect=(0, 0.35 / (3.3 * lines + 1.1), 1, 1))
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _draw_recompute(panel: Any, rows: Sequence[QualityRow], codecs: Sequence[str]) -> None:
    panel.axhline(
        rows[0].reference_exact_match, color="black", linestyle="--", label="full prefill", lw=1
    )
    for codec in codecs:
        for policy in dict.fromkeys(row.policy for row in rows):
            label = policy if len(codecs) == 1 else f"{policy}, {codec}"
            mine = [row for row in rows if row.codec == codec and row.policy == policy]
            # Recomputing nothing is where every policy starts, with links or without.
            start = _NONE + policy[len(policy.removesuffix(LINKED)) :]
            unrepaired = [row for row in rows if row.codec == codec and row.policy == start]
            line = sorted({*mine, *unrepaired}, key=lambda row: row.recomputed_share)
            color = _color(policy, rows)
            style = _LINES[codecs.index(codec) % len(_LINES)]
            if policy != start:
                shares = [row.recomputed_share for row in line]
                panel.plot(shares, [row.exact_match for row in line], style, color=color, lw=1.5)
            _points(panel, [row.recomputed_share for row in mine], mine, color, label)
    # Small shares are what matters: a square root spreads them and still shows 0.
    panel.set_xscale("function", functions=(_root, _square))
    panel.set_xlim(-0.002, 1.08)
    panel.set_xticks([0, 0.05, 0.15, 0.3, 0.5, 1.0])
    panel.xaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share:.0%}"))
    panel.tick_params(labelsize=8)
    panel.set_xlabel("reused tokens computed again", fontsize=9)
    kind = rows[0].question_type.replace("_", " ")
    panel.set_title(f"{kind} ({rows[0].num_questions:,})", fontsize=10)


def _draw_bytes(panel: Any, rows: Sequence[QualityRow]) -> None:
    panel.axhline(
        rows[0].reference_exact_match, color="black", linestyle="--", label="full prefill", lw=1
    )
    for policy, ratio in dict.fromkeys((row.policy, row.ratio) for row in rows):
        mine = sorted(
            (row for row in rows if (row.policy, row.ratio) == (policy, ratio)),
            key=lambda row: row.bytes_per_token,
        )
        color = _color(policy, rows)
        sizes = [row.bytes_per_token for row in mine]
        panel.plot(sizes, [row.exact_match for row in mine], color=color, lw=1)
        _points(panel, sizes, mine, color, "_")
        shown = policy if ratio is None else f"{ratio:.0%}"
        last = (sizes[-1], mine[-1].exact_match)
        panel.annotate(shown, last, (4, 0), textcoords="offset points", fontsize=7, color=color)
    panel.tick_params(labelsize=8)
    panel.set_xlabel("stored bytes a token", fontsize=9)
    panel.set_title("all questions, by codec", fontsize=10)


def _points(
    panel: Any, x: Sequence[float], rows: Sequence[QualityRow], color: str, label: str
) -> None:
    # The interval is of the difference; around the policy's own score it reads the same way.
    ends = [
        (
            max(0.0, row.exact_match - row.reference_exact_match - row.difference_low),
            max(0.0, min(1.0, row.reference_exact_match + row.difference_high) - row.exact_match),
        )
        for row in rows
    ]
    panel.errorbar(
        x,
        [row.exact_match for row in rows],
        yerr=list(zip(*ends, strict=True)),
        fmt="o",
        markersize=4,
        capsize=2.5,
        elinewidth=1,
        color=color,
        label=label,
    )


def _limits(rows: Sequence[QualityRow]) -> tuple[float, float]:
    lowest = min(row.reference_exact_match + min(0.0, row.difference_low) for row in rows)
    return max(-0.03, lowest - 0.08), 1.03


def _color(policy: str, rows: Sequence[QualityRow]) -> str:
    others = [row.policy for row in rows if row.policy not in _COLORS]
    if policy in _COLORS:
        return _COLORS[policy]
    return _SPARE_COLORS[list(dict.fromkeys(others)).index(policy) % len(_SPARE_COLORS)]


def _root(share: Any) -> Any:
    return abs(share) ** 0.5 * (1 - 2 * (share < 0))


def _square(root: Any) -> Any:
    return root * abs(root)
