"""A question of a real set, and the short answers that it offers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random

NUM_CHOICES = 4


@dataclass(frozen=True)
class Asked:
    """A question with the chunks of its prompt.

    Attributes
    ----------
    question
        The question.
    answers
        Accepted answers, at least one.
    chunks
        The texts in the order of the prompt.
    supporting
        Which of `chunks` the answer follows from.
    choices
        Four short answers of one kind, one of them right; empty where a set has none.
    before
        For each chunk, the earlier chunks of its document.
    is_summary
        Whether the answer is a summary.
    """

    question: str
    answers: tuple[str, ...]
    chunks: tuple[str, ...]
    supporting: tuple[int, ...]
    choices: tuple[str, ...] = ()
    before: tuple[tuple[str, ...], ...] = ()
    is_summary: bool = False


def draw_choices(
    right: str, in_prompt: Sequence[str], others: Iterable[str], rng: Random
) -> tuple[str, ...]:
    """Return the right answer and three others in drawn order, first those of the same prompt.

    Parameters
    ----------
    right
        The right answer.
    in_prompt
        Answers of the same kind that the prompt gives for other subjects.
    others
        Answers of the same kind, drawn from if the prompt has too few.
    rng
        Where randomness comes from.
    """
    near = sorted({*in_prompt} - {right})
    far = sorted({*others} - {*near, right})
    wrong = rng.sample(near, min(len(near), NUM_CHOICES - 1))
    wrong += rng.sample(far, NUM_CHOICES - 1 - len(wrong))
    return tuple(rng.sample([right, *wrong], NUM_CHOICES))
