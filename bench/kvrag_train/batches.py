"""Packs contexts and their questions into one forward.

The documents come first; all questions follow, each with its answer. Each question attends to the
documents and to itself, not to other questions, and its positions continue after the documents.
Every question is thus asked exactly as if it were alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from kvrag_corpus.questions import Question, QuestionType
from kvrag_train.prompts import PromptFormat

IGNORED = -100


@dataclass(frozen=True)
class Item:
    """Documents, questions about them, and the format to ask in."""

    documents: tuple[str, ...]
    questions: tuple[Question, ...]
    format: PromptFormat


@dataclass(frozen=True)
class PackedBatch:
    """Token rows and everything that the masks and the loss need; every tensor (rows, tokens).

    Attributes
    ----------
    input_ids, position_ids
        int64; what the model reads.
    segments
        int64; 0 for tokens that all questions of the row share, otherwise the question's number.
    documents
        int64; the document's number, -1 outside documents.
    targets
        int64; the next token if it belongs to an answer, otherwise `IGNORED`.
    question_ids
        int64; which question of the batch a target belongs to, -1 elsewhere.
    question_types
        The type of each question of the batch.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    segments: torch.Tensor
    documents: torch.Tensor
    targets: torch.Tensor
    question_ids: torch.Tensor
    question_types: tuple[QuestionType, ...]

    def attention_mask(self, isolate_documents: bool = False) -> torch.Tensor:
        """Return the mask (rows, 1, queries, keys), True where attention is allowed.

        Parameters
        ----------
        isolate_documents
            Whether document tokens see only BOS and their own document, as when each
            document was computed alone and is reused without repair.
        """
        length = self.input_ids.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        shared = self.segments[:, None, :] == 0
        same_question = self.segments[:, None, :] == self.segments[:, :, None]
        mask = causal & (shared | same_question)
        if isolate_documents:
            mine = self.documents[:, :, None]
            is_own = mine == self.documents[:, None, :]
            is_bos = torch.arange(length) == 0
            mask = mask & ((mine < 0) | is_own | is_bos)
        return mask[:, None]


class _Row:
    """One row of a batch while it is filled."""

    def __init__(self) -> None:
        self.input_ids: list[int] = []
        self.position_ids: list[int] = []
        self.segments: list[int] = []
        self.documents: list[int] = []
        self.targets: list[int] = []
        self.question_ids: list[int] = []

    def put(self, ids: list[int], document: int = -1) -> None:
        """Append tokens that all questions of the row share."""
        self._put(ids, len(self.input_ids), 0, document)

    def put_question(self, asked: list[int], answered: list[int], question_id: int) -> None:
        """Append a question with its answer (end included) after the shared tokens."""
        start = self.segments.count(0)
        self._put(asked + answered[:-1], start, self.segments[-1] + 1, -1)
        self.targets[-len(answered) :] = answered
        self.question_ids[-len(answered) :] = [question_id] * len(answered)

    def _put(self, ids: list[int], start: int, segment: int, document: int) -> None:
        count = len(ids)
        self.input_ids += ids
        self.position_ids += range(start, start + count)
        self.segments += [segment] * count
        self.documents += [document] * count
        self.targets += [IGNORED] * count
        self.question_ids += [-1] * count


def pack(items: Sequence[Item], tokenizer: PreTrainedTokenizerBase) -> PackedBatch:
    """Pack `items`, one row each, padded at the end to the longest.

    Returns
    -------
    PackedBatch
        Padding has segment 0 and no target; nothing before it attends to it.
    """
    texts: list[str] = []
    for item in items:
        texts += [item.format.before_documents, *item.documents, "\n\n"]
        texts += [item.format.after_documents]
        for question in item.questions:
            texts += [
                item.format.question.format(question=question.text),
                f" {question.full_answer}",
            ]
    pieces = iter(list(tokenizer(texts, add_special_tokens=False)["input_ids"]))
    rows = []
    types: list[QuestionType] = []
    for item in items:
        row = _Row()
        row.put([int(tokenizer.bos_token_id), *next(pieces)])
        documents = [next(pieces) for _ in item.documents]
        separator = next(pieces)
        for number, ids in enumerate(documents):
            if number:
                row.put(separator)
            row.put(ids, number)
        row.put(next(pieces))
        for question in item.questions:
            asked, answer = next(pieces), next(pieces)
            answer = [*answer, int(tokenizer.eos_token_id)]
            row.put_question(asked, answer, len(types))
            types.append(question.type)
        rows.append(row)
    length = max(len(row.input_ids) for row in rows)
    fillers = {"documents": -1, "targets": IGNORED, "question_ids": -1}
    fillers["input_ids"] = int(tokenizer.pad_token_id or 0)
    tensors = {}
    for name in vars(rows[0]):
        lists = [getattr(row, name) for row in rows]
        filler = fillers.get(name, 0)
        tensors[name] = torch.tensor([list_ + [filler] * (length - len(list_)) for list_ in lists])
    return PackedBatch(**tensors, question_types=tuple(types))
