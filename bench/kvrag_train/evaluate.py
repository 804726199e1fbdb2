"""Exact match by question type, with full prefill and with plain reuse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from kvrag_corpus.corpus import Corpus
from kvrag_corpus.questions import Question
from kvrag_train.batches import Item, pack
from kvrag_train.model import answer_logits, questions_right
from kvrag_train.prompts import PLAIN, PromptFormat


@dataclass(frozen=True)
class Score:
    """Questions asked and answered exactly right."""

    right: int
    asked: int

    @property
    def exact_match(self) -> float:
        """The share answered exactly right."""
        return self.right / max(1, self.asked)


def corpus_items(corpus: Corpus, prompt_format: PromptFormat = PLAIN) -> list[Item]:
    """Return the questions of `corpus`, those that share their chunks in one item."""
    items = []
    for chunks, questions in groupby(corpus.questions, key=lambda question: question.chunks):
        texts = tuple(chunk.text for chunk in chunks)
        asked = tuple(Question(q.type, q.question, q.answers, q.supporting) for q in questions)
        items.append(Item(texts, asked, prompt_format))
    return items


def evaluate(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    items: Sequence[Item],
    isolate_documents: bool = False,
    rows_per_batch: int = 32,
) -> dict[str, Score]:
    """Score `model` on `items`: right is what the full answer says, from first to last token.

    Parameters
    ----------
    isolate_documents
        Score plain reuse: every document computed after BOS alone, nothing repaired.

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
