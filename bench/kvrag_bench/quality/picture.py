"""The judged rows as a picture: the gap closed against work, and KL against stored bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import PercentFormatter

from kvrag.errors import ParameterError
from kvrag_bench.quality.entrants import LINKED, NO_DOCUMENT, NOISE_FLOOR
from kvrag_bench.quality.rows import OVERALL, Estimate, QualityRow

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
_TITLE_CHARACTERS = 40  # over each panel


def check_picture_path(path: Path) -> None:
    """Raise ParameterError unless a PNG can be written to `path`."""
    if path.suffix.lower() != ".png":
        raise ParameterError(f"picture {path}: expected a name that ends in .png")
    if not path.parent.is_dir():
        raise ParameterError(f"picture {path}: there is no folder {path.parent}")


def draw_quality(rows: Sequence[QualityRow], path: Path) -> None:
    """Draw the gap closed over the share of full prefill's work as a PNG.

    One context has a panel for each question type; several contexts have a panel each, over all
    questions. Bars are 95 % paired bootstrap intervals. 0 is plain reuse of chunks encoded alone, 1
    is full prefill, the dashed line. With several codecs a last panel shows the divergence over
    bytes a token.

    Parameters
    ----------
    rows
        At least one.
    path
        File to write.

    Raises
    ------
    ParameterError
        When no row knows the gap: policy ``none`` over chunks encoded alone did not take part.
    """
    drawn = [
        row
        for row in rows
        if row.gap_closed is not None and row.policy not in (NO_DOCUMENT, NOISE_FLOOR)
    ]
    if not drawn:
        raise ParameterError(
            "picture: it shows how much of the gap between plain reuse and full prefill is closed, "
            "so policy 'none' and context 'none' have to take part"
        )
    if len({row.context for row in drawn}) > 1:
        drawn = [row for row in drawn if row.question_type == OVERALL]
        shown = {_context_title(row): row.context for row in drawn}
        groups = {t: [row for row in drawn if row.context == c] for t, c in shown.items()}
    else:
        groups = {}
        for row in drawn:
            groups.setdefault(row.question_type.replace("_", " "), []).append(row)
    codecs = list(dict.fromkeys(row.codec for row in drawn))
    num_panels = len(groups) + (len(codecs) > 1)
    columns = min(_PANELS_A_LINE, num_panels)
    lines = -(-num_panels // columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(3.6 * columns + 0.6, 3.3 * lines + 1.1), squeeze=False
    )
    panels = list(axes.flat)
    for panel, (title, group) in zip(panels, groups.items(), strict=False):
        _draw_gap(panel, group, codecs, title)
    if len(codecs) > 1:
        _draw_bytes(panels[len(groups)], [row for row in drawn if row.question_type == OVERALL])
    for panel in panels[num_panels:]:
        panel.set_visible(False)
    for panel in panels[:num_panels]:
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(labelsize=8)
    handles: dict[str, Any] = {}
    for panel in panels[:num_panels]:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    first = drawn[0]
    title = (
        f"{first.model} on {first.dataset}, {first.num_questions:,} questions: from plain reuse "
        "(0 %) to full prefill (bars: 95 % of paired resamples)"
    )
    figure.suptitle(fill(title, _TITLE_CHARACTERS * columns), fontsize=11)
    figure.legend(
        handles.values(), handles.keys(), loc="lower center", ncols=len(handles), frameon=False
    )
    figure.tight_layout(rect=(0, 0.35 / (3.3 * lines + 1.1), 1, 1))
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _context_title(row: QualityRow) -> str:
    return "chunks alone" if row.context == _NONE else f"chunks after {row.context}"


def _draw_gap(panel: Any, rows: Sequence[QualityRow], codecs: Sequence[str], title: str) -> None:
    panel.axhline(1.0, color="black", linestyle="--", label="full prefill", lw=1)
    for codec in codecs:
        for policy in dict.fromkeys(row.policy for row in rows):
            label = policy if len(codecs) == 1 else f"{policy}, {codec}"
            mine = [row for row in rows if row.codec == codec and row.policy == policy]
            # Recomputing nothing is where every policy starts, with links or without.
            start = _NONE + policy[len(policy.removesuffix(LINKED)) :]
            unrepaired = [row for row in rows if row.codec == codec and row.policy == start]
            line = sorted({*mine, *unrepaired}, key=lambda row: row.work_share)
            color = _color(policy, rows)
            if policy != start:
                style = _LINES[codecs.index(codec) % len(_LINES)]
                shares = [row.work_share for row in line]
                panel.plot(shares, [_gap(row).mean for row in line], style, color=color, lw=1.5)
            gaps = [_gap(row) for row in mine]
            panel.errorbar(
                [row.work_share for row in mine],
                [gap.mean for gap in gaps],
                yerr=(
                    [max(0.0, gap.mean - gap.low) for gap in gaps],
                    [max(0.0, gap.high - gap.mean) for gap in gaps],
                ),
                fmt="o",
                markersize=4,
                capsize=2.5,
                elinewidth=1,
                color=color,
                label=label,
            )
    # Small shares are what matters: a square root spreads them and still shows 0.
    panel.set_xscale("function", functions=(_root, _square))
    panel.set_xlim(-0.002, 1.08)
    panel.set_ylim(max(-1.0, min(-0.05, *(_gap(row).low for row in rows))), 1.05)
    panel.set_xticks([0, 0.05, 0.15, 0.3, 0.5, 1.0])
    panel.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    panel.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    panel.set_xlabel("share of full prefill's work", fontsize=9)
    panel.set_ylabel("gap closed", fontsize=9)
    panel.set_title(f"{title} ({rows[0].num_questions:,})", fontsize=10)


def _gap(row: QualityRow) -> Estimate:
    assert row.gap_closed is not None
    return row.gap_closed


def _draw_bytes(panel: Any, rows: Sequence[QualityRow]) -> None:
    for policy, ratio in dict.fromkeys((row.policy, row.ratio) for row in rows):
        mine = sorted(
            (row for row in rows if (row.policy, row.ratio) == (policy, ratio)),
            key=lambda row: row.bytes_per_token,
        )
        color = _color(policy, rows)
        sizes = [row.bytes_per_token for row in mine]
        # What equals full prefill has no place on a logarithmic axis.
        panel.plot(
            sizes, [max(row.kl, 1e-4) for row in mine], "o-", color=color, lw=1, markersize=4
        )
        shown = policy if ratio is None else f"{ratio:.0%}"
        last = (sizes[-1], max(mine[-1].kl, 1e-4))
        panel.annotate(shown, last, (4, 0), textcoords="offset points", fontsize=7, color=color)
    panel.set_yscale("log")
    panel.set_xlabel("stored bytes a token", fontsize=9)
    panel.set_ylabel("KL to full prefill, nats", fontsize=9)
    panel.set_title("all questions, by codec", fontsize=10)


def _color(policy: str, rows: Sequence[QualityRow]) -> str:
    others = [row.policy for row in rows if row.policy not in _COLORS]
    if policy in _COLORS:
        return _COLORS[policy]
    return _SPARE_COLORS[list(dict.fromkeys(others)).index(policy) % len(_SPARE_COLORS)]


def _root(share: Any) -> Any:
    return abs(share) ** 0.5 * (1 - 2 * (share < 0))


def _square(root: Any) -> Any:
    return root * abs(root)
