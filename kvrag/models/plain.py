"""Prompts for models without a chat template: text that the model completes."""

from __future__ import annotations

from collections.abc import Sequence

# Text, question, answer. They show that answers are found in a text, short, and on one line.
# With questions of general knowledge instead, Gemma-3-270M got 4 of 10 look-ups right, not 8.
_EXAMPLES = (
    (
        "The bakery in Mill Lane opens at seven and closes at noon.",
        "When does the bakery open?",
        "At seven",
    ),
    (
        "Anna bought the house from Peter Lund in 1931.",
        "From whom did Anna buy the house?",
        "Peter Lund",
    ),
)


def plain_prompt(question: str, texts: Sequence[str]) -> str:
    """Return the chunks with blank lines between them, then the question to complete."""
    return "\n\n".join([*texts, f"Question: {question}\nAnswer:"])


def few_shot_prompt(question: str, texts: Sequence[str]) -> str:
    """Return the same with solved examples before the question.

    A base model then answers the question in one line. The examples follow the chunks, so that
    chunks stay at the beginning, where they may be exact.
    """
    solved = [f"{plain_prompt(asked, [text])} {answer}" for text, asked, answer in _EXAMPLES]
    return plain_prompt(question, [*texts, *solved])
