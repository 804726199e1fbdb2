"""`kvrag bench regress`: the run."""

from __future__ import annotations

from collections.abc import Callable

from kvrag_bench.regress.options import RegressOptions
from kvrag_bench.regress.quality import quality_entries, rate_entries
from kvrag_bench.regress.results import Results, results_here
from kvrag_bench.regress.speed import speed_entries


def run_regress_bench(
    options: RegressOptions, on_progress: Callable[[str], None] = lambda _: None
) -> Results:
    """Measure all ratios, on this machine.

    Raises
    ------
    ParameterError, ModelLoadError, UnsupportedModelError
        If something cannot be measured.
    """
    return results_here(
        [
            *speed_entries(options, on_progress),
            *rate_entries(options, on_progress),
            *quality_entries(options, on_progress),
        ]
    )
