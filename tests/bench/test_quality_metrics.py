import pytest

from kvrag.tune.calibrate import mean_interval
from kvrag_bench.judge.exact_match import exact_match
from kvrag_bench.quality import metrics


@pytest.mark.parametrize(
    ("given", "answers", "exact", "f1", "substring"),
    [
        ("Paris", ["Paris"], 1, 1, 1),
        ("  the paris. ", ["Paris"], 1, 1, 1),
        ("London", ["Paris", "London"], 1, 1, 1),
        ("Paris, France", ["Paris"], 0, 2 / 3, 1),
        ("Parisian", ["Paris"], 0, 0, 0),
        ("", ["Paris"], 0, 0, 0),
        ("the", ["a"], 1, 1, 0),  # articles only: nothing is left of either
        ("red red blue", ["red blue blue"], 0, 2 / 3, 0),
    ],
)
def test_short_answers(
    given: str, answers: list[str], exact: float, f1: float, substring: float
) -> None:
    assert exact_match(given, answers) == exact
    assert metrics.token_f1(given, answers) == pytest.approx(f1)
    assert metrics.substring_match(given, answers) == substring


def test_strict_match_keeps_every_letter_and_rouge_l_the_longest_common_subsequence() -> None:
    assert metrics.strict_match(" Paris\n", ["Paris"]) == 1
    assert metrics.strict_match("paris", ["Paris"]) == 0
    # police killed gunman / police kill gunman: Lin (2004), without the articles
    assert metrics.rouge_l("police kill gunman", ["police killed gunman"]) == pytest.approx(2 / 3)
    assert metrics.rouge_l("gunman kill police", ["police killed gunman"]) == pytest.approx(1 / 3)
    assert metrics.rouge_l("x y", ["z", "x y"]) == 1
    assert metrics.rouge_l("", ["z"]) == 0


def test_intervals_are_seeded_hold_the_mean_and_narrow_with_more_questions() -> None:
    few, many = [1.0, 0.0, 0.0, -1.0, 1.0] * 4, [1.0, 0.0, 0.0, -1.0, 1.0] * 200
    assert mean_interval(few) == mean_interval(few)
    low, high = mean_interval(few)
    assert low < 0.2 < high
    narrow_low, narrow_high = mean_interval(many)
    assert narrow_high - narrow_low < (high - low) / 5
    # The normal approximation: 1.96 standard errors to either side.
    assert narrow_high - narrow_low == pytest.approx(2 * 1.96 * (0.56 / 1000) ** 0.5, rel=0.1)
    assert mean_interval([0.0] * 7) == (0.0, 0.0)
