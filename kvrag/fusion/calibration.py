"""What each policy loses and costs with one model: measured once, read by ``auto``."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvrag.errors import IndexFormatError, ParameterError
from kvrag.fusion.policies.base import PromptRows, RecomputePolicy, planned_rows
from kvrag.fusion.repair import Repair, make_repair
from kvrag.loading.cost import LoadingCost, StoredRows, pipelined_seconds

FORMAT_VERSION = 2


@dataclass(frozen=True)
class Measured:
    """One policy at one ratio.

    Attributes
    ----------
    policy, ratio
        As `make_repair` takes them; a ratio of None for policies that take none.
    loss
        Share of full prefill's quality that is lost, 0 to 1; never below 0.
    loss_low, loss_high
        Its 95 % interval, paired over questions.

    Raises
    ------
    ParameterError
        When `make` could not make the policy, or a figure is none.
    """

    policy: str
    ratio: float | None
    loss: float
    loss_low: float
    loss_high: float

    def __post_init__(self) -> None:
        self.make()
        _require_numbers(self.loss, self.loss_low, self.loss_high)
        if not 0.0 <= self.loss <= 1.0:
            raise ParameterError(f"loss {self.loss} of {self.policy}: expected a share, 0 to 1")

    def make(self) -> Repair:
        """Return the policy."""
        return make_repair(self.policy, ratio=self.ratio)


@dataclass(frozen=True)
class Cost:
    """Seconds of a fused prompt on the machine of the calibration.

    Attributes
    ----------
    fixed_seconds, seconds_per_row, seconds_per_cached_token
        A constant, the price of one row in one layer, and of one token whose stored KV is read.

    Raises
    ------
    ParameterError
        When one of them is below 0, or not finite.
    """

    fixed_seconds: float
    seconds_per_row: float
    seconds_per_cached_token: float

    def __post_init__(self) -> None:
        prices = self.fixed_seconds, self.seconds_per_row, self.seconds_per_cached_token
        _require_numbers(*prices)
        if min(prices) < 0.0:
            raise ParameterError(f"cost {prices}: expected 0 or more seconds each")

    def of(self, num_rows: int, num_cached: int) -> float:
        """Return the estimate for so many rows, summed over layers, and cached tokens."""
        return (
            self.fixed_seconds
            + self.seconds_per_row * num_rows
            + self.seconds_per_cached_token * num_cached
        )


@dataclass(frozen=True)
class Estimate:
    """Seconds that a prompt is expected to take.

    Attributes
    ----------
    seconds
        From the layout to the first token.
    load_seconds
        Of loading, hidden or not; None where it was not measured.
    """

    seconds: float
    load_seconds: float | None = None


@dataclass(frozen=True)
class Calibration:
    """What the referee found for one model.

    Attributes
    ----------
    model_fingerprint
        The model; another one has to be calibrated anew.
    data
        What was asked.
    measure
        What quality is: ``"exact match"``, or where no answers are known ``"agreement"`` of the
        likeliest tokens with full prefill's.
    num_questions
        Questions asked.
    policies
        What was measured.
    cost
        What prompts cost whose KV is near.
    loading
        What it costs to load KV from the index's store; None where that was not measured.
    """

    model_fingerprint: str
    data: str
    measure: str
    num_questions: int
    policies: tuple[Measured, ...]
    cost: Cost
    loading: LoadingCost | None = None

    def estimate(
        self,
        policy: RecomputePolicy,
        prompt: PromptRows,
        num_fresh: int,
        records: Sequence[StoredRows],
    ) -> Estimate:
        """Return what a prompt will take with a policy.

        Parameters
        ----------
        prompt
            Before the question is asked.
        num_fresh
            Tokens that are computed in any case.
        records
            What is loaded for the prompt, exact spans included.
        """
        num_asked = policy.question_layers(prompt.num_layers).stop
        asked = self.cost.seconds_per_row * num_asked * num_fresh
        compute = self.cost.of(planned_rows(policy, prompt, num_fresh), prompt.num_reused)
        if self.loading is None:
            return Estimate(compute)
        load = sum(self.loading.tier(one.tier).of(one.num_rows) for one in records)
        # The question looks at so many layers before any of them is computed again.
        looked = load * num_asked / prompt.num_layers
        seconds = pipelined_seconds(load - looked, compute - asked, prompt.num_layers)
        if num_asked:
            seconds += pipelined_seconds(looked, asked, num_asked)
        return Estimate(seconds, load)

    def to_json(self) -> str:
        """Return the calibration as JSON text."""
        return json.dumps({"format_version": FORMAT_VERSION, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str) -> Calibration:
        """Return what `to_json` wrote.

        Raises
        ------
        IndexFormatError
            When the text is something else; `where` says what to call it.
        """
        try:
            fields: Mapping[str, Any] = json.loads(text)
            version = fields["format_version"]
            if version != FORMAT_VERSION:
                raise IndexFormatError(
                    f"{where}: calibration of format {version}, this version reads "
                    f"{FORMAT_VERSION}: run 'kvrag calibrate' again"
                )
            # Calibrations of before loading was measured have none.
            loading = fields.get("loading")
            return cls(
                model_fingerprint=str(fields["model_fingerprint"]),
                data=str(fields["data"]),
                measure=str(fields["measure"]),
                num_questions=int(fields["num_questions"]),
                policies=tuple(Measured(**policy) for policy in fields["policies"]),
                cost=Cost(**fields["cost"]),
                loading=LoadingCost.from_dict(loading) if loading is not None else None,
            )
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise IndexFormatError(
                f"{where}: no calibration ({type(error).__name__}: {error}); run 'kvrag calibrate' "
                "again"
            ) from error


def _require_numbers(*values: Any) -> None:
    for value in values:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value):
            raise ParameterError(f"expected a finite number, found {value!r}")
