"""The training curve as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

_LINES = (
    ("full/overall", "full prefill, all questions", "tab:blue", "-"),
    ("full/carried_over", "full prefill, carried over", "tab:blue", "--"),
    ("reuse/overall", "plain reuse, all questions", "tab:red", "-"),
    ("reuse/carried_over", "plain reuse, carried over", "tab:red", "--"),
)


def _running_mean(values: Sequence[float], weight: float = 0.05) -> list[float]:
    means: list[float] = []
    for value in values:
        means.append(value if not means else means[-1] + weight * (value - means[-1]))
    return means


def draw_curve(parts: Sequence[Sequence[Mapping[str, float]]], path: Path) -> None:
    """Draw loss, training accuracy and validation scores over steps.

    Parameters
    ----------
    parts
        The lines of ``log.jsonl`` of each part of the run; steps are counted through.
    path
        PNG to write.
    """
    records: list[dict[str, float]] = []
    for part in parts:
        done = records[-1]["step"] + 1 if records else 0
        records += [{**record, "step": record["step"] + done} for record in part]
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(9, 8), sharex=True)
    for label, key in (("copying", "copying_accuracy"), ("questions", "accuracy")):
        chosen = [record for record in records if key in record]
        steps = [record["step"] for record in chosen]
        top.plot(steps, _running_mean([r["loss"] for r in chosen]), label=f"loss, {label}")
        bottom.plot(
            steps,
            _running_mean([record[key] for record in chosen]),
            label=f"training batch, {label}",
            color="tab:gray",
            linestyle=":" if key == "copying_accuracy" else "-",
        )
    stages = {record["stage"]: record["step"] for record in reversed(records) if "stage" in record}
    for stage, step in stages.items():
        for axis in (top, bottom):
            axis.axvline(step, color="lightgray", zorder=0)
        place = {"xycoords": ("data", "axes fraction"), "fontsize": 8, "ha": "center"}
        top.annotate(f"{stage + 1}", (step, 1.01), **place)
    top.set_title("stages of the curriculum", fontsize=9, pad=14)
    for key, label, colour, style in _LINES:
        chosen = [record for record in records if key in record]
        steps = [record["step"] for record in chosen]
        bottom.plot(steps, [r[key] for r in chosen], style, color=colour, label=label)
    top.set_yscale("log")
    top.set_ylabel("cross-entropy of answer tokens (nats)")
    bottom.set_ylabel("exact match (five documents)")
    bottom.set_xlabel("step")
    bottom.set_ylim(0, 1.02)
    for axis in (top, bottom):
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
