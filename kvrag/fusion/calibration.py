"""Calibration: the loss and cost of each policy with one model, measured for ``auto``."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvrag.arguments import shown
from kvrag.errors import IndexFormatError, ParameterError
from kvrag.fusion.policies.base import PromptRows, RecomputePolicy, planned_rows
from kvrag.fusion.repair import Repair, make_repair, names_gone
from kvrag.loading.cost import LoadingCost, StoredRows, pipelined_seconds
from kvrag.regularfile import checksum

FORMAT_VERSION = 3
_OLDEST_VERSION = 2  # had no checksum


@dataclass(frozen=True)
class Measured:
    """The measured loss of one policy at one ratio.

    Attributes
    ----------
    policy, ratio
        Arguments of `make_repair`; the ratio is None for policies that take none.
    loss
        Share of full prefill's quality that is lost, 0 to 1; never below 0.
    loss_low, loss_high
        The loss's 95 % interval, paired over questions.

    Raises
    ------
    ParameterError
        If `make` cannot make the policy, or a figure is not a finite number.
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
    """The cost model of a fused prompt, on the machine of the calibration.

    Attributes
    ----------
    fixed_seconds, seconds_per_row, seconds_per_cached_token
        The constant cost, the cost of one row in one layer, and the cost of reading one token's
        stored KV.

    Raises
    ------
    ParameterError
        If one of them is below 0 or not finite.
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
        """Return the estimated seconds for rows, summed over layers, and cached tokens."""
        return (
            self.fixed_seconds
            + self.seconds_per_row * num_rows
            + self.seconds_per_cached_token * num_cached
        )


@dataclass(frozen=True)
class Estimate:
    """The time that a prompt is expected to take.

    Attributes
    ----------
    seconds
        Seconds from the layout to the first token.
    load_seconds
        Seconds of loading, hidden or not; None if loading was not measured.
    """

    seconds: float
    load_seconds: float | None = None


@dataclass(frozen=True)
class Calibration:
    """The results of calibrating one model.

    Attributes
    ----------
    model_fingerprint
        Identifies the model; another model needs its own calibration.
    data
        The questions' data set.
    measure
        The measure of quality: ``"exact match"``, or ``"agreement"`` of the most likely tokens
        with full prefill's if no answers are known.
    num_questions
        Number of questions asked.
    policies
        The measured policies.
    cost
        The cost of prompts whose KV is near.
    loading
        The cost of loading KV from the index's store; None if that was not measured.
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
        """Return the expected time of a prompt with a policy.

        Parameters
        ----------
        policy
            The recompute policy.
        prompt
            The prompt's reused tokens, before the question's attention is observed.
        num_fresh
            Number of tokens that are computed in any case.
        records
            The records to load for the prompt, including those of exact spans.
        """
        num_asked = policy.question_layers(prompt.num_layers).stop
        asked = self.cost.seconds_per_row * num_asked * num_fresh
        compute = self.cost.of(planned_rows(policy, prompt, num_fresh), prompt.num_reused)
        if self.loading is None:
            return Estimate(compute)
        load = sum(self.loading.tier(one.tier).of(one.num_rows) for one in records)
        # The question's attention is observed in `num_asked` layers before any is computed again.
        looked = load * num_asked / prompt.num_layers
        seconds = pipelined_seconds(load - looked, compute - asked, prompt.num_layers)
        if num_asked:
            seconds += pipelined_seconds(looked, asked, num_asked)
        return Estimate(seconds, load)

    def to_json(self) -> str:
        """Return the calibration as JSON text."""
        values = {"format_version": FORMAT_VERSION, **asdict(self)}
        values["checksum"] = checksum(values)
        return json.dumps(values, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str) -> Calibration:
        """Return the calibration that `to_json` wrote.

        Raises
        ------
        IndexFormatError
            If the text is not a calibration, or was altered; the message names it by `where`.
        """
        try:
            fields: Mapping[str, Any] = json.loads(text)
            version = fields["format_version"]
            if version not in (_OLDEST_VERSION, FORMAT_VERSION):
                raise IndexFormatError(
                    f"{where}: calibration of format {shown(version)}, but this version reads "
                    f"formats {_OLDEST_VERSION} and {FORMAT_VERSION}: run 'kvrag calibrate' again"
                )
            # Older calibrations did not measure loading.
            loading = fields.get("loading")
            made = cls(
                model_fingerprint=str(fields["model_fingerprint"]),
                data=str(fields["data"]),
                measure=str(fields["measure"]),
                num_questions=int(fields["num_questions"]),
                policies=tuple(
                    Measured(**policy)
                    for policy in fields["policies"]
                    if not names_gone(str(policy["policy"]))
                ),
                cost=Cost(**fields["cost"]),
                loading=LoadingCost.from_dict(loading) if loading is not None else None,
            )
            found, expected = fields.get("checksum"), checksum(fields)
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise IndexFormatError(
                f"{where}: not a calibration ({type(error).__name__}: {error}); run "
                "'kvrag calibrate' again"
            ) from error
        if found != expected and (found is not None or version != _OLDEST_VERSION):
            raise IndexFormatError(
                f"{where} was altered or damaged after it was written: its checksum is "
                f"{shown(found)}, its content gives {expected!r}; run 'kvrag calibrate' again"
            )
        return made


def _require_numbers(*values: Any) -> None:
    for value in values:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value):
            raise ParameterError(f"expected a finite number, found {shown(value)}")
