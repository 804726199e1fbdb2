"""Policy ``auto``: what it takes for which budget, and that its calibration is checked."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace

import pytest

from kvrag.errors import IndexFormatError, ParameterError
from kvrag.fusion.controller import Calibration, Cost, LoadingController, Measured
from kvrag.fusion.layout import ReusedSpan
from kvrag.fusion.policies.base import (
    NonePolicy,
    PromptRows,
    RecomputePolicy,
    planned_rows,
)
from kvrag.fusion.policies.boundary import BoundaryPolicy
from kvrag.fusion.policies.deviation import DeviationPolicy
from kvrag.fusion.policies.query import QueryPolicy
from kvrag.fusion.policies.two_stage import TwoStagePolicy
from kvrag.loading.cost import LoadingCost, StoredRows, TierCost
from kvrag.models.kv_model import KVModel
from kvrag.regularfile import checksum
from kvrag_testing.bench_top import Bench
from tests.support.models import make_model, make_tokenizer

PROMPT = PromptRows(1100, 10, (ReusedSpan("a", 50, 0, 1000),))
RECORDS = (StoredRows("a", (), 1000),)
NUM_FRESH = 100
NO_INTERVAL = {"loss_low": 0, "loss_high": 0}
CALIBRATION = Calibration(
    model_fingerprint="m",
    data="d",
    measure="exact match",
    num_questions=10,
    policies=(
        Measured("none", None, 0.3, 0.2, 0.4),
        Measured("deviation", 0.15, 0.1, 0.05, 0.2),
        Measured("query", 0.05, 0.02, 0.0, 0.04),
        Measured("query", 0.15, 0.005, 0.0, 0.01),
        Measured("two_stage", 0.3, 0.0, -0.01, 0.0),
    ),
    # A row in a layer costs a millisecond.
    cost=Cost(0.0, 0.001, 0.0),
)


def _store(per_record: float, per_token: float) -> LoadingCost:
    return LoadingCost("file:x", (TierCost("file:x", per_record, per_token),))


def test_planned_rows_are_those_that_are_computed() -> None:
    bench = Bench(KVModel(make_model(num_hidden_layers=4), make_tokenizer()))
    prompt = bench.prompt(2, 0, 3, 1)
    policies = (
        NonePolicy(),
        DeviationPolicy(0.3),
        QueryPolicy(0.3),
        QueryPolicy(0.3, depth=0.5),
        TwoStagePolicy(0.2),
        TwoStagePolicy(0.2, look=0.75),
    )
    for policy in policies:
        fused = bench.fuse(prompt, policy)
        report = fused.report
        inexact = report.num_reused + report.num_recomputed
        spans = (ReusedSpan("all", 0, 0, inexact),)
        # Nothing before the first candidate changes after the look.
        first = [*fused.picks[0][:1].tolist(), 0][0]
        rows = PromptRows(report.num_tokens, 4, spans, num_leading=int((fused.fresh < first).sum()))
        spent = sum(report.rows_by_layer) + report.rows_asked
        planned = planned_rows(policy, rows, report.num_fresh)
        # Rows between chunks join later than the question.
        ends_early = policy.question_layers(4).stop in (1, 2, 3)
        assert spent < planned <= spent + 4 * report.num_fresh if ends_early else planned == spent
    assert planned_rows(BoundaryPolicy(16), PROMPT, NUM_FRESH) == 10 * (NUM_FRESH + 16)


@pytest.mark.parametrize(
    ("budget", "policy", "loss"),
    [
        # Without one, the cheapest that loses little.
        ({}, QueryPolicy(0.15), 0.005),
        ({"loss": 0.02}, QueryPolicy(0.05), 0.02),
        ({"loss": 0.0}, TwoStagePolicy(0.3), 0.0),
        ({"loss": 0.5}, NonePolicy(), 0.3),
        ({"ratio": 0.05}, QueryPolicy(0.05), 0.02),
        ({"ratio": 0.0}, NonePolicy(), 0.3),
        # none: 1 s; query 5 %: 1 s, 1 s to look, 0.5 s again.
        ({"ttft": 2.6}, QueryPolicy(0.05), 0.02),
        ({"ttft": 1.5}, NonePolicy(), 0.3),
        ({"ttft": 0.1}, NonePolicy(), 0.3),
    ],
)
def test_what_a_budget_allows(
    budget: dict[str, float], policy: RecomputePolicy, loss: float
) -> None:
    auto = LoadingController(calibration=CALIBRATION, **budget)
    repair, expected = auto.choose(PROMPT, NUM_FRESH)
    assert (repair.policy, expected.loss) == (policy, loss)


@pytest.mark.parametrize(
    ("seconds", "budget", "ratio"),
    [
        # 10 layers of 100 fresh rows are 1 s; of 1,000 reused ones a tenth is another second.
        (0.0, {"loss": 0.1}, 0.1),
        (1.9, {"loss": 0.1}, 0.1),
        # Of 25 s of loading 6 s of computing show 0.4 s more than 2 s: the same time, less lost.
        (25.0, {"loss": 0.1}, 0.5),
        (500.0, {"loss": 0.1}, 1.0),
        # Quality is kept where nothing hides, and a time bounds loading too.
        (0.0, {"loss": 0.05}, 0.5),
        (10.0, {"ttft": 11.0}, 0.5),
        (10.0, {"ttft": 10.21}, 0.1),
    ],
)
def test_the_share_that_hides_behind_loading(
    seconds: float, budget: dict[str, float], ratio: float
) -> None:
    measured = tuple(Measured("boundary", r, 0.1 - r / 10, 0.0, 1.0) for r in (0.1, 0.3, 0.5, 1.0))
    calibration = replace(CALIBRATION, policies=measured, loading=_store(0.0, seconds / 1000))
    auto = LoadingController(calibration=calibration, **budget)
    repair, expected = auto.choose(PROMPT, NUM_FRESH, RECORDS)
    assert repair.policy == BoundaryPolicy(ratio=ratio)
    assert expected.loss == pytest.approx(0.1 - ratio / 10)


def test_a_share_bounds_policies_that_take_none() -> None:
    """1,000 reused tokens in one chunk: 20 of them are 2 %."""
    policies = (
        Measured("none", None, 0.3, 0.2, 0.4),
        Measured("boundary:tokens=20", None, 0.0, 0.0, 0.0),
    )
    policy = LoadingController(calibration=replace(CALIBRATION, policies=policies))
    assert replace(policy, ratio=0.02).choose(PROMPT, NUM_FRESH)[0].policy == BoundaryPolicy(20)
    assert replace(policy, ratio=0.019).choose(PROMPT, NUM_FRESH)[0].policy == NonePolicy()


def test_without_calibration_it_says_what_to_do() -> None:
    with pytest.raises(ParameterError, match="kvrag calibrate"):
        LoadingController().choose(PROMPT, NUM_FRESH)
    with pytest.raises(ParameterError, match="kvrag calibrate"):
        LoadingController(calibration=replace(CALIBRATION, policies=())).choose(PROMPT, NUM_FRESH)


def test_a_calibration_of_0_2_loses_only_policies_that_have_left() -> None:
    fields = json.loads(CALIBRATION.to_json())
    for spec in ("none:temperature=0.9:scale=1.1", "gradual:on=attention"):
        gone = {**fields["policies"][0], "policy": spec, "ratio": None}
        fields["policies"].insert(1, gone)
    fields["checksum"] = checksum({k: v for k, v in fields.items() if k != "checksum"})
    assert Calibration.from_json(json.dumps(fields), "here") == CALIBRATION


@pytest.mark.parametrize(
    "change",
    [
        *("[", "[1]", "7", "[" * 100_000),
        {"format_version": 2},  # of before 0.2.0
        {"loading": {"store": "file:x"}},
        {"policies": [{"policy": "best", "ratio": 1, "loss": 0, "loss_low": 0, "loss_high": 0}]},
        {"policies": [{"policy": "none"}]},
        {"cost": {"fixed_seconds": "much"}},
        {"num_questions": float("inf")},
        *(
            {"policies": [{"policy": "none", "ratio": None, "loss": 0, **NO_INTERVAL} | changed]}
            for changed in (
                {"policy": "auto"},
                {"policy": "boundary:tokens=1.5"},
                {"policy": "none", "ratio": 0.1},
                {"loss": 1.5},
                {"loss": float("nan")},
                {"loss": True},
            )
        ),
        *(
            {"cost": {"fixed_seconds": price, "seconds_per_row": 0, "seconds_per_cached_token": 0}}
            for price in (float("inf"), float("nan"), -1.0, 10**400)
        ),
    ],
)
def test_a_damaged_calibration_is_refused(change: dict[str, object] | str) -> None:
    text = change
    if not isinstance(text, str):
        text = json.dumps(json.loads(CALIBRATION.to_json()) | change)
    with pytest.raises(IndexFormatError, match="here"):
        Calibration.from_json(text, "here")


def test_an_altered_calibration_is_refused() -> None:
    """Every change of a byte that leaves a calibration is seen, of the version too."""
    written = CALIBRATION.to_json()
    for at, byte in enumerate(written):
        for other in {chr(ord(byte) ^ 1), chr(ord(byte) ^ 2), "9"} - {byte}:
            altered = written[:at] + other + written[at + 1 :]
            with contextlib.suppress(IndexFormatError):
                assert Calibration.from_json(altered, "here") == CALIBRATION, altered


# -- load or compute --------------------------------------------------------------------------

NEAR, FAR = TierCost("memory:", 0.0, 0.001), TierCost("s3://b", 0.5, 0.02)
TWO_TIERS = LoadingCost("tiered:memory:|s3://b", (NEAR, FAR))


def _prompt(*tiers: int | None) -> tuple[PromptRows, tuple[StoredRows, ...]]:
    """Chunks of 100 tokens each, one behind the other."""
    spans = tuple(ReusedSpan(str(n), 50 + 100 * n, 0, 100) for n in range(len(tiers)))
    records = tuple(StoredRows(str(n), (), 100, tier) for n, tier in enumerate(tiers))
    return PromptRows(60 + 100 * len(tiers), 10, spans), records


def _computed(
    stored: tuple[PromptRows, tuple[StoredRows, ...]], loading: LoadingCost | None = TWO_TIERS
) -> list[str]:
    prompt, records = stored
    # 10 layers of 100 rows take a second; a chunk loads in 0.1 s or in 2.5 s.
    policies = (Measured("boundary", 0.1, 0.0, 0.0, 0.0),)
    auto = LoadingController(calibration=replace(CALIBRATION, policies=policies, loading=loading))
    decisions = auto.decide(prompt, 60, records)
    assert not decisions or len(decisions) == len(records)
    return [one.chunk_id for one in decisions if one.is_computed]


def test_what_is_far_is_computed_and_what_is_near_is_loaded() -> None:
    assert _computed(_prompt(0, 1, 0, 1, 0)) == ["1", "3"]
    assert _computed(_prompt(0, 0, 0)) == []
    assert _computed(_prompt(0, None)) == ["1"]  # not known where: at home, which is far


def test_what_hides_behind_computing_is_loaded_though_it_is_slower() -> None:
    # 0.6 s of computing the question hide half a second of loading; computing would take longer.
    loading = LoadingCost("file:x", (TierCost("file:x", 0.55, 0.0),))
    prompt = replace(_prompt(0)[0], spans=(ReusedSpan("0", 50, 0, 50),))
    assert _computed((prompt, (StoredRows("0", (), 50, 0),)), loading) == []


def test_without_a_measurement_all_is_loaded() -> None:
    assert _computed(_prompt(1, 1), None) == []
    auto = LoadingController(calibration=CALIBRATION)
    assert not auto.weighs_loading
    prompt, records = _prompt(1)
    assert auto.decide(prompt, 60, records) == ()


def test_a_modified_auto_decides_as_well() -> None:
    auto = LoadingController(calibration=replace(CALIBRATION, loading=TWO_TIERS))
    shifted = replace(auto, shift=0.5)
    prompt, records = _prompt(0, 1)
    assert shifted.weighs_loading
    assert shifted.decide(prompt, 60, records) == auto.decide(prompt, 60, records)
    repair, expected = shifted.choose(prompt, 60, records)
    plain, known = auto.choose(prompt, 60, records)
    assert (repair.policy, repair.shift) == (plain.policy, 0.5)
    # What was measured without a shift says nothing about the loss with it.
    assert (expected.loss, expected.seconds) == (None, known.seconds)
