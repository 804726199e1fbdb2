"""Exact match by question type, with full prefill and with plain reuse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from kvrag.bench.corpus.context import sample_context
from kvrag.bench.corpus.grammar import Grammar
from kvrag.bench.corpus.names import NameSource, Split
from kvrag.bench.corpus.questions import TYPE_SHARES, QuestionType
from kvrag.training.batches import Item, pack
from kvrag.training.model import answer_logits, questions_right
from kvrag.training.prompts import PLAIN, PromptFormat


@dataclass(frozen=True)
class Score:
    """Questions asked and answered exactly right."""

    right: int
    asked: int

    @property
    def exact_match(self) -> float:
        """The share answered exactly right."""
        return self.right / max(1, self.asked)


def held_out_items(
    split: Split,
    num_questions: int,
    num_documents: int = 5,
    seed: int = 0,
    prompt_format: PromptFormat = PLAIN,
    questions_per_context: int = 5,
    shares: Mapping[QuestionType, float] = TYPE_SHARES,
) -> list[Item]:
    """Return items of `split` with `num_questions` questions in all."""
    rng = Random(f"evaluation {split} {seed}")
    names = NameSource(split, rng)
    items: list[Item] = []
    missing = num_questions
    while missing > 0:
        count = min(questions_per_context, missing)
        context = sample_context(rng, names, num_documents, count, shares, Grammar())
        items.append(Item(context.texts, context.questions, prompt_format))
        missing -= len(context.questions)
    return items


def evaluate(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    items: Sequence[Item],
    isolate_documents: bool = False,
    rows_per_batch: int = 32,
) -> dict[str, Score]:
    """Score `model` on `items`.

    Parameters
    ----------
    isolate_documents
        Score plain reuse: every document computed behind BOS alone, nothing repaired.

    Returns
    -------
    dict
        A score for each question type, and for ``"overall"``.
    """
    right: dict[str, int] = {}
    asked: dict[str, int] = {}
    was_training = model.training
    model.train(False)
    with torch.no_grad():
        for start in range(0, len(items), rows_per_batch):
            batch = pack(items[start : start + rows_per_batch], tokenizer)
            results = questions_right(*answer_logits(model, batch, isolate_documents))
            for kind, result in zip(batch.question_types, results.tolist(), strict=True):
                for label in (str(kind), "overall"):
                    asked[label] = asked.get(label, 0) + 1
                    right[label] = right.get(label, 0) + int(result)
    model.train(was_training)
    return {label: Score(right[label], asked[label]) for label in sorted(asked)}
