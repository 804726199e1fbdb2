"""How right an answer is, by its text, beside exact match."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from kvrag.tune.calibrate import interval, resampled_means
from kvrag_bench.judge.exact_match import normalise_answer


def strict_match(given: str, answers: Sequence[str]) -> float:
    """Return 1 if the text is an accepted answer, letter by letter, otherwise 0."""
    return float(given.strip() in {answer.strip() for answer in answers})


def substring_match(given: str, answers: Sequence[str]) -> float:
    """Return 1 if an accepted answer occurs, as whole words, in the text, otherwise 0."""
    padded = f" {normalise_answer(given)} "
    wanted = [normalise_answer(answer) for answer in answers]
    return float(any(answer and f" {answer} " in padded for answer in wanted))


def token_f1(given: str, answers: Sequence[str]) -> float:
    """Return the best F1 between the words of the text and those of an accepted answer."""
    return _best(_word_f1, given, answers)


def rouge_l(given: str, answers: Sequence[str]) -> float:
    """Return the best ROUGE-L F-measure (Lin 2004, beta = 1) against an accepted answer."""
    return _best(_subsequence_f1, given, answers)


def _best(
    score: Callable[[list[str], list[str]], float], given: str, answers: Sequence[str]
) -> float:
    words = normalise_answer(given).split()
    return max(score(words, normalise_answer(answer).split()) for answer in answers)


def _word_f1(given: list[str], wanted: list[str]) -> float:
    if not given or not wanted:
        return float(given == wanted)
    return _f1(sum((Counter(given) & Counter(wanted)).values()), given, wanted)


def _subsequence_f1(given: list[str], wanted: list[str]) -> float:
    if not given or not wanted:
        return float(given == wanted)
    row = [0] * (len(wanted) + 1)
    for word in given:
        diagonal = 0
        for index, other in enumerate(wanted, start=1):
            above = row[index]
            row[index] = diagonal + 1 if word == other else max(above, row[index - 1])
            diagonal = above
    return _f1(row[-1], given, wanted)


def _f1(num_common: int, given: list[str], wanted: list[str]) -> float:
    return 2 * num_common / (len(given) + len(wanted))


def ratio_interval(
    parts: Sequence[float], wholes: Sequence[float], *, seed: int = 0, confidence: float = 0.95
) -> tuple[float, float]:
    """Return the percentile bootstrap interval of a ratio of two means over the same questions.

    Parameters
    ----------
    parts, wholes
        One value each for each question; the same questions are drawn of both. Means of `wholes`
        must not be zero.
    seed, confidence
        As for `mean_interval`.
    """
    # The same seed draws the same questions.
    means = resampled_means(parts, seed) / resampled_means(wholes, seed)
    return interval(means, confidence)
