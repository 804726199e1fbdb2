"""The controller ``auto``: chooses policy and ratio for each prompt from a calibration."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, ClassVar

from kvrag.arguments import shown
from kvrag.errors import IndexFormatError, ParameterError
from kvrag.fusion.policies import AUTO_POLICY
from kvrag.fusion.policies.base import (
    NonePolicy,
    PromptRows,
    RecomputePolicy,
    check_ratio,
    mean_count,
    planned_counts,
    planned_rows,
    share_of,
)
from kvrag.fusion.policies.registry import POLICIES, parameters_of
from kvrag.fusion.repair import MODIFIERS, Repair, add_given, check_given, make_repair, names_gone
from kvrag.loading.cost import ChunkDecision, LoadingCost, StoredRows, pipelined_seconds
from kvrag.optiontable import check_fields, describe, parse_spec
from kvrag.regularfile import checksum

# -- what a calibration found --------------------------------------------------------------------

FORMAT_VERSION = 3
_BESIDE = ("format_version", "checksum")  # what a file has besides the fields


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
        seconds = self.fixed_seconds + self.seconds_per_row * num_rows
        return seconds + self.seconds_per_cached_token * num_cached


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
            fields: dict[str, Any] = json.loads(text)
            version = fields["format_version"]
            if version != FORMAT_VERSION:
                raise IndexFormatError(
                    f"{where}: calibration of format {shown(version)}, but this version reads "
                    f"format {FORMAT_VERSION}: run 'kvrag calibrate' again"
                )
            expected, found = checksum(fields), fields.get("checksum")
            given = {key: value for key, value in fields.items() if key not in _BESIDE}
            policies = [one for one in given["policies"] if not names_gone(str(one["policy"]))]
            given["policies"] = tuple(Measured(**policy) for policy in policies)
            given["num_questions"] = int(given["num_questions"])
            given["cost"] = Cost(**given["cost"])
            if given["loading"] is not None:
                given["loading"] = LoadingCost.from_dict(given["loading"])
            made = cls(**given)
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise IndexFormatError(
                f"{where}: not a calibration ({type(error).__name__}: {error}); run "
                "'kvrag calibrate' again"
            ) from error
        if found != expected:
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


# -- the controllers -----------------------------------------------------------------------------

# Estimates within this factor count as equal.
_SAME = 1.02


@dataclass(frozen=True)
class Expected:
    """A controller's expectations for a prompt; None where unknown.

    Attributes
    ----------
    loss
        Share of full prefill's quality that will be lost.
    seconds, load_seconds
        Seconds that the prompt will take, and seconds of loading among them, hidden or not.
    """

    loss: float | None = None
    seconds: float | None = None
    load_seconds: float | None = None


@dataclass(frozen=True)
class LoadingController:
    """Choose policy and ratio for each prompt, from a calibration.

    The controller takes the cheapest policy within the budget that loses no more than `loss`. If
    all lose more, it takes the one that loses least; if the budget allows nothing, the cheapest
    of all. If the cost of loading was measured, it prefers a policy that loses less to the
    cheapest one when loading hides the difference in time.

    Source: CacheBlend (arXiv 2405.16444) §5.1, the loading controller: the share at which computing
    takes as long as loading, and no less than quality needs. Deviations: it chooses the criterion
    as well as the share, among those that were measured; quality is measured for the model instead
    of assumed.

    Parameters
    ----------
    ratio
        Largest share of the reused tokens that may be recomputed; None sets no bound.
    ttft
        Seconds that fusing may take on the calibration's machine; None sets no bound.
    loss
        Share of full prefill's quality that may be lost.
    shift
        How far tokens that stay reused follow, whichever policy is chosen (see `Repair`).
    calibration
        The measurements for the model.

    Raises
    ------
    ParameterError
        If a value has the wrong type or is out of range.
    """

    name: ClassVar[str] = AUTO_POLICY
    ratio: float | None = None
    ttft: float | None = None
    loss: float = 0.01
    shift: float | None = None
    calibration: Calibration | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_fields(self, "policy")
        self._shifted(Repair(NonePolicy()))
        if self.ratio is not None:
            check_ratio(self.ratio)
        if self.ttft is not None and not 0.0 < self.ttft < math.inf:
            raise ParameterError(f"auto ttft {self.ttft}: expected a finite number above 0")
        if not 0.0 <= self.loss <= 1.0:
            raise ParameterError(f"auto loss {self.loss}: expected a share between 0 and 1")

    def __str__(self) -> str:
        return describe(self)

    def require_calibration(self) -> Calibration:
        """Return the calibration. Raise ParameterError if there is none."""
        if self.calibration is None or not self.calibration.policies:
            raise ParameterError(
                "policy 'auto' needs measurements of the model: run 'kvrag calibrate'"
            )
        return self.calibration

    @property
    def weighs_loading(self) -> bool:
        """Whether `decide` can decide anything; only then does it need to know the tiers."""
        return self.calibration is not None and self.calibration.loading is not None

    def decide(
        self, prompt: PromptRows, num_fresh: int, records: Sequence[StoredRows]
    ) -> Sequence[ChunkDecision]:
        """Decide for each record whether to load or compute it; an empty result loads all.

        Chunks are computed in the order of the time that this saves, and as many of them as
        minimise the estimate for the whole prompt. A chunk that is slower to load than to compute
        is still loaded if other work hides that. Computing a chunk is always exact.

        Source: CacheBlend §5.1 weighs loading against computing for a whole prompt. Deviation:
        it decides for each chunk separately, by the tier that holds it.

        Parameters
        ----------
        prompt
            The prompt's reused tokens, before any record is opened.
        num_fresh
            Number of tokens that are computed in any case.
        records
            The records that would be loaded, including those of exact spans.
        """
        calibration = self.require_calibration()
        loading = calibration.loading
        if loading is None or not records:
            return ()
        per_token = calibration.cost.seconds_per_row * prompt.num_layers
        decisions = [
            ChunkDecision(
                chunk_id=record.chunk_id,
                tier=len(loading.tiers) - 1 if record.tier is None else record.tier,
                num_tokens=record.num_rows,
                is_computed=False,
                expected_load_seconds=loading.tier(record.tier).of(record.num_rows),
                expected_compute_seconds=per_token * record.num_rows,
            )
            for record in records
        ]
        saved = [one.expected_load_seconds - one.expected_compute_seconds for one in decisions]
        order = sorted(range(len(saved)), key=saved.__getitem__, reverse=True)
        policy = self._choose(prompt, num_fresh, records, is_free=False)[1].policy
        seconds = [calibration.estimate(policy, prompt, num_fresh, records).seconds]
        loaded = list(records)
        for number in order:
            record = records[number]
            loaded.remove(record)
            prompt = _without(prompt, record)
            num_fresh += record.num_rows
            repairing = policy if prompt.spans else NonePolicy()
            seconds.append(calibration.estimate(repairing, prompt, num_fresh, loaded).seconds)
        num_computed = min(range(len(seconds)), key=seconds.__getitem__)
        if _SAME * seconds[num_computed] < seconds[0]:
            for number in order[:num_computed]:
                decisions[number] = replace(decisions[number], is_computed=True)
        return decisions

    def choose(
        self, prompt: PromptRows, num_fresh: int, records: Sequence[StoredRows] = ()
    ) -> tuple[Repair, Expected]:
        """Return a prompt's repair and its expectations; for the parameters see `decide`."""
        # Computing that loading hides is free: take the least loss for the same time.
        is_free = self.weighs_loading
        loss, repair, found = self._choose(prompt, num_fresh, records, is_free=is_free)
        shifted = self._shifted(repair)
        # A loss measured without a shift says nothing about the loss with it.
        known = loss if shifted == repair else None
        return shifted, Expected(known, found.seconds, found.load_seconds)

    def _shifted(self, repair: Repair) -> Repair:
        return repair if self.shift is None else replace(repair, shift=self.shift)

    def _choose(
        self, prompt: PromptRows, num_fresh: int, records: Sequence[StoredRows], *, is_free: bool
    ) -> tuple[float, Repair, Estimate]:
        """Return the loss, the policy and its estimate that the budget allows.

        With `is_free`, a policy as fast as the cheapest may replace it.
        """
        calibration = self.require_calibration()
        if not prompt.spans:
            # Without inexact tokens, nothing is lost.
            nothing = Repair(NonePolicy())
            estimate = calibration.estimate(nothing.policy, prompt, num_fresh, records)
            return 0.0, nothing, estimate
        most_tokens = math.inf if self.ratio is None else share_of(self.ratio, prompt.num_reused)
        most_seconds = math.inf if self.ttft is None else self.ttft
        offers: list[tuple[float, Repair, Estimate]] = []
        allowed = []
        for measured in calibration.policies:
            repair = measured.make()
            estimate = calibration.estimate(repair.policy, prompt, num_fresh, records)
            offers.append((measured.loss, repair, estimate))
            num_tokens = mean_count(planned_counts(repair.policy, prompt))
            if num_tokens <= most_tokens and estimate.seconds <= most_seconds:
                allowed.append(offers[-1])
        good = [one for one in allowed if one[0] <= self.loss]
        cheapest = min(good or offers, key=lambda one: (one[2].seconds, one[0] if good else 0.0))
        if good and is_free:
            limit = _SAME * cheapest[2].seconds
            allowed = [one for one in good if one[2].seconds <= limit]
        elif good or not allowed:
            return cheapest
        return min(allowed, key=lambda one: (one[0], one[2].seconds))


Choice = Repair | LoadingController
"""A caller's choice: a policy, or the controller that chooses one for each prompt."""

_PARAMETERS = frozenset(one.name for one in fields(LoadingController)) - {"calibration", *MODIFIERS}


def make_choice(
    spec: str, *, ratio: float | None = None, boundary_tokens: int | None = None
) -> Choice:
    """Return the choice that a string names: a policy (`make_repair`) or ``auto``.

    Parameters and errors are those of `make_repair`.
    """
    name, given = parse_spec(spec, "policy", POLICIES, [LoadingController.name])
    if name != LoadingController.name:
        return make_repair(spec, ratio=ratio, boundary_tokens=boundary_tokens)
    add_given(given, spec, ratio=ratio, tokens=boundary_tokens)
    check_given(name, given, _PARAMETERS)
    return LoadingController(**given)


def calibrated(choice: Choice, load: Callable[[], Calibration | None]) -> Choice:
    """Return a choice with its calibration, which `load` returns if it is needed and missing.

    Raise ParameterError if nothing was measured.
    """
    if not isinstance(choice, LoadingController):
        return choice
    found = choice if choice.calibration is not None else replace(choice, calibration=load())
    found.require_calibration()
    return found


def takes_ratio(spec: str) -> bool:
    """Return whether `make_choice` takes a ratio with `spec`.

    It takes none if the policy has no ratio (``"none"``), or if `spec` already sets the amount
    (``"query:ratio=0.5"``, ``"boundary:tokens=4"``). Raises ParameterError as `make_choice` does.
    """
    name, given = parse_spec(spec, "policy", POLICIES, [LoadingController.name])
    accepted = _PARAMETERS if name == LoadingController.name else parameters_of(name)
    return "ratio" in accepted and not given.keys() & {"ratio", "tokens"}


def _without(prompt: PromptRows, record: StoredRows) -> PromptRows:
    """Return the prompt as it is when a record's tokens are computed."""
    meant = record.chunk_id, record.context_ids
    spans = tuple(span for span in prompt.spans if (span.chunk_id, span.context_ids) != meant)
    return replace(prompt, spans=spans)
