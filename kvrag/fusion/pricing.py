"""Whether full prefill of a prompt is faster than taking its stored KV, by measured prices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from kvrag.arguments import shown
from kvrag.errors import ParameterError
from kvrag.fusion.policies.base import PromptRows, RecomputePolicy, fresh_rows, planned_counts
from kvrag.fusion.report import FusionReport
from kvrag.loading.pace import Pace

# Reuse has to be this much faster than full prefill: prices are of an idle machine, and of no store
# that no prompt has read yet.
_GAIN = 0.95
# Larger numbers, which a damaged file may have, do not fit NumPy's.
_MOST = 1e18


@dataclass(frozen=True)
class RowPrices:
    """Seconds of computing rows of a prompt in all of a model's layers.

    Attributes
    ----------
    num_rows, seconds
        Numbers of rows, ascending, and the time that each takes. Between two of them, and after
        the last, the time is linear. Fewer rows than the first take as long as the first: a layer's
        weights are read for one row too.

    Raises
    ------
    ParameterError
        If these are not two numbers or more, or not in order.
    """

    num_rows: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        rows, seconds = self.num_rows, self.seconds
        is_sound = (
            2 <= len(rows) == len(seconds)
            and all(isinstance(one, int) and 0 < one < _MOST for one in rows)
            and all(isinstance(one, int | float) and 0 < one < _MOST for one in seconds)
            and all(one < other for one, other in pairwise(rows))
        )
        if not is_sound:
            raise ParameterError(
                f"prices {shown(rows)}, {shown(seconds)}: expected two or more ascending numbers "
                "of rows, and seconds above 0 for each"
            )

    def of(self, num_rows: float) -> float:
        """Return the seconds for a number of rows."""
        last, before = self.num_rows[-1], self.num_rows[-2]
        if num_rows <= last:
            return float(np.interp(num_rows, self.num_rows, self.seconds))
        slope = max(0.0, self.seconds[-1] - self.seconds[-2]) / (last - before)
        return self.seconds[-1] + slope * (num_rows - last)

    def of_reuse(self, policy: RecomputePolicy, prompt: PromptRows, num_fresh: int) -> float:
        """Return the seconds of computing what a policy leaves to compute.

        Parameters
        ----------
        policy
            The policy.
        prompt
            The prompt's reused tokens, before the question's attention is observed.
        num_fresh
            Number of tokens that are computed in any case.
        """
        num_layers = prompt.num_layers
        if not prompt.spans:
            return self.of(num_fresh)
        counts = planned_counts(policy, prompt)
        again = fresh_rows(policy, prompt, num_fresh)
        num_asked = policy.question_layers(num_layers).stop
        rows = [sum(both) for both in zip(again, counts, strict=True)]
        return self._of_layers(rows, num_asked, num_fresh)

    def of_report(self, report: FusionReport) -> float:
        """Return the seconds of computing what a prompt has computed."""
        num_asked = report.rows_asked / max(1, report.num_fresh)
        return self._of_layers(report.rows_by_layer, num_asked, report.num_fresh)

    def _of_layers(self, rows: Sequence[int], num_asked: float, num_fresh: int) -> float:
        """Return the seconds of each layer's rows, and of a look in some layers before them."""
        price = {count: self.of(count) for count in set(rows)}
        seconds = sum(price[count] for count in rows) + self.of(num_fresh) * num_asked
        return seconds / len(rows)


@dataclass(frozen=True)
class Pricing:
    """What decides between stored KV and full prefill for the prompts of one engine.

    Attributes
    ----------
    rows
        What computing costs.
    loading
        The seconds that the engine's prompts have waited for stored KV, by tokens.
    """

    rows: RowPrices
    loading: Pace

    def takes_full(
        self, policy: RecomputePolicy, prompt: PromptRows, num_fresh: int, num_exact: int
    ) -> bool:
        """Return whether full prefill is expected to be as fast as reuse, or faster.

        Parameters
        ----------
        policy, prompt, num_fresh
            See `RowPrices.of_reuse`.
        num_exact
            Number of stored tokens besides those of `prompt`; nothing is computed for them.
        """
        num_stored = prompt.num_reused + num_exact
        most = self._most(policy, prompt, num_fresh, num_stored)
        if most <= 0.0:
            return True
        if (self.loading.seconds(num_stored) or 0.0) < most:
            return False
        # Loading may have been slow for a while only: without what it cost, it is tried again.
        self.loading.forget_oldest()
        return True

    def seems_full(self, policy: RecomputePolicy, prompt: PromptRows, num_fresh: int) -> bool:
        """Return what `takes_full` is expected to return; asking changes nothing."""
        num_stored = prompt.num_reused
        most = self._most(policy, prompt, num_fresh, num_stored)
        return (self.loading.seconds(num_stored) or 0.0) >= most

    def _most(
        self, policy: RecomputePolicy, prompt: PromptRows, num_fresh: int, num_stored: int
    ) -> float:
        """Return the most seconds that loading may take where reuse is to be faster."""
        full = _GAIN * self.rows.of(num_fresh + num_stored)
        return full - self.rows.of_reuse(policy, prompt, num_fresh)
