"""The gap to full prefill that contestants close, over the questions of several runs together.

``python -m kvrag_bench.quality.together FILE.jsonl...`` reads what `kvrag bench quality --out` has
written for one model. Use it where each run has a separate index.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from kvrag.errors import KVRagError, ParameterError
from kvrag_bench.judge.judgements import Contestant
from kvrag_bench.quality.metrics import ratio_interval

PLAIN_REUSE = Contestant("none", None)
"""Nothing computed again over chunks encoded alone: the gap that others are measured by."""


@dataclass(frozen=True)
class Closed:
    """What one contestant closes.

    Attributes
    ----------
    num_questions
        Questions, of all runs.
    kl
        Mean KL divergence from full prefill, in nats.
    gap_closed, low, high
        1 less the ratio of that to plain reuse's, with its 95 % bootstrap interval over questions.
    """

    contestant: Contestant
    num_questions: int
    kl: float
    gap_closed: float
    low: float
    high: float


def close_together(paths: Iterable[Path]) -> list[Closed]:
    """Return what each contestant closes that was judged on every question.

    Raises
    ------
    ParameterError
        When a file is not one of judgements, or plain reuse was not judged on every question.
    """
    found: dict[Contestant, dict[tuple[Path, str], float]] = {}
    for path in dict.fromkeys(paths):
        for contestant, question, kl in _read(path):
            found.setdefault(contestant, {})[path, question] = kl
    questions = sorted({place for one in found.values() for place in one})
    plain = found.get(PLAIN_REUSE, {})
    if not questions or len(plain) < len(questions):
        raise ParameterError(
            f"plain reuse was judged on {len(plain)} of {len(questions)} questions: run 'kvrag "
            "bench quality' with 'none' among --policies and --context"
        )
    wholes = [plain[place] for place in questions]
    return [
        _closed(contestant, [judged[place] for place in questions], wholes)
        for contestant, judged in found.items()
        if len(judged) == len(questions)
    ]


def _read(path: Path) -> Iterator[tuple[Contestant, str, float]]:
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ParameterError(f"{path} cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            kl = fmean(record["judgement"]["kl"])
            record["contestant"].pop("compression", None)  # kvrag 0.2 had it
            yield Contestant(**record["contestant"]), record["question"], kl
        except (ValueError, KeyError, TypeError) as error:
            raise ParameterError(
                f"{path}, line {number}: not a judgement of 'kvrag bench quality'"
            ) from error


def _closed(contestant: Contestant, parts: Sequence[float], wholes: Sequence[float]) -> Closed:
    low, high = ratio_interval(parts, wholes)
    gap_closed = 1 - fmean(parts) / fmean(wholes)
    return Closed(contestant, len(parts), fmean(parts), gap_closed, 1 - high, 1 - low)


def main(arguments: Sequence[str]) -> None:
    """Print a line for each contestant."""
    rows = close_together(map(Path, arguments))
    print(f"{rows[0].num_questions} questions; KL to full prefill, share of the gap closed")
    for row in rows:
        one = row.contestant
        policy = one.policy if one.ratio is None else f"{one.policy} {one.ratio:.0%}"
        print(
            f"{policy:16} after {one.context:12} {row.kl:6.3f}  {row.gap_closed:5.0%} "
            f"({row.low:.0%} to {row.high:.0%})"
        )


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KVRagError as error:
        raise SystemExit(f"error: {error}") from None
