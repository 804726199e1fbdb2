"""A question with its chunks, and the prompt made from both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from kvrag.engine.asking import few_shot_prompt, plain_prompt
from kvrag.models.templates import render as render_template


@dataclass(frozen=True)
class Passage:
    """A chunk for the model to read.

    Attributes
    ----------
    text
        The chunk's text, normalised.
    before
        The earlier chunks of its document, in order and normalised; empty if unknown.
    """

    text: str
    before: tuple[str, ...] = ()


@dataclass(frozen=True)
class JudgedQuestion:
    """One record of a data set.

    Attributes
    ----------
    place
        Where the record is, for messages.
    type
        The kind of question, according to the data set; empty if it has none.
    question
        The question.
    answers
        Accepted answers, at least one.
    texts
        The chunks, normalised, in the order of the prompt.
    is_summary
        Whether the answer is a summary, which is scored by ROUGE-L as well.
    before
        For each of `texts`, the earlier chunks of its document; empty if unknown.
    document_answers
        The documents' answers where the given chunks have none; `answers` then says ``unknown``
        or the like. Empty for most questions.
    choices
        Short answers to choose from, one of them right; empty if the question is only open.
    """

    place: str
    type: str
    question: str
    answers: tuple[str, ...]
    texts: tuple[str, ...]
    is_summary: bool = False
    before: tuple[tuple[str, ...], ...] = ()
    document_answers: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()

    @property
    def passages(self) -> list[Passage]:
        """The chunks, in the order of the prompt."""
        before = self.before or ((),) * len(self.texts)
        return [Passage(text, earlier) for text, earlier in zip(self.texts, before, strict=True)]


@dataclass(frozen=True)
class RenderedPrompt:
    """A prompt's text, and whether the tokenizer must add its special tokens."""

    text: str
    add_special_tokens: bool

    def token_ids(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """Return the ids that the plain pipeline feeds to the model."""
        encoding = tokenizer(self.text, add_special_tokens=self.add_special_tokens, verbose=False)
        return list(encoding["input_ids"])

    def answer_ids(self, tokenizer: PreTrainedTokenizerBase, answer: str) -> list[int]:
        """Return the ids of an answer that follows the prompt."""
        # A chat template ends with a new line, a plain prompt with "Answer:".
        text = f" {answer}" if self.add_special_tokens else answer
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def render(
    question: str, texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, use_chat_template: bool
) -> RenderedPrompt:
    """Return the prompt that ``kvrag query`` would build around these chunks."""
    if not use_chat_template:
        return RenderedPrompt(plain_prompt(question, texts), True)
    if getattr(tokenizer, "chat_template", None):
        content = "\n\n".join([*texts, f"Question: {question}"])
        text = render_template(
            tokenizer, [{"role": "user", "content": content}], add_generation_prompt=True
        )
        return RenderedPrompt(text, add_special_tokens=False)
    return RenderedPrompt(few_shot_prompt(question, texts), True)
