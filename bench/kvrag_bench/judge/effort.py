"""What judging costs, and how long it still takes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Effort:
    """What a judge has spent so far.

    Attributes
    ----------
    num_questions, num_judgements
        Questions judged, and judgements on them.
    plain_seconds
        Full prefills of their prompts by the model itself, which `judging_seconds` contains.
    judging_seconds, encoding_seconds
        All that the judgements took, and the chunks before them.
    """

    num_questions: int = 0
    num_judgements: int = 0
    plain_seconds: float = 0.0
    judging_seconds: float = 0.0
    encoding_seconds: float = 0.0

    def __str__(self) -> str:
        if not self.plain_seconds:
            return "nothing was left to judge"
        judging = self.judging_seconds / self.plain_seconds
        encoding = self.encoding_seconds / self.plain_seconds
        return (
            f"{self.num_judgements / self.num_questions:.1f} contestants a question took "
            f"{judging:.1f} times its full prefill, and encoding its chunks {encoding:.1f} times"
        )


def progress(num_done: int, num_questions: int, seconds: float, share_done: float) -> str:
    """Return a line with the number of the current question and the remaining time.

    Parameters
    ----------
    seconds
        What the questions before it took.
    share_done
        Their share of what there is to read.
    """
    line = f"question {num_done + 1:,} of {num_questions:,}"
    if num_done < 2:
        return line
    left = seconds * (1 / share_done - 1)
    return f"{line}, {left / 60:.0f} min left" if left > 90 else f"{line}, {left:.0f} s left"
