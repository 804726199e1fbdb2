"""Exact match on questions held out, shared among the processes of a run."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from kvrag_train.batches import IGNORED
from kvrag_train.links.batch import LinkBatch, Packer
from kvrag_train.links.data import LinkItem
from kvrag_train.links.processes import Processes
from kvrag_train.links.student import Student
from kvrag_train.links.teaching import Teacher
from kvrag_train.model import questions_right

_ROWS = 16
"""Rows of a batch in each process."""


@torch.no_grad()
def score(
    student: Student,
    packer: Packer,
    items: Sequence[LinkItem],
    processes: Processes,
) -> dict[str, float]:
    """Return exact match by type of question: linked, and of plain prompts.

    Each answer token is predicted after the right ones, which is exact match of greedy decoding.
    """
    labels = sorted({"overall", *(kind for item in items for kind in item.types if kind)})
    found: dict[str, float] = {}
    for name, linked in (("linked", True), ("plain", False)):
        num_right, num_asked = (dict.fromkeys(labels, 0) for _ in range(2))
        rows = _ROWS * processes.count
        for start in range(0, len(items), rows):
            own, counts = processes.share(items[start : start + rows])
            batch = packer.pack(own, linked=linked)
            results = right(student.logits(batch), batch).tolist()
            if not counts:
                continue
            for kind, result in zip(batch.types, results, strict=True):
                for label in {kind, "overall"} - {""}:
                    num_right[label] += result
                    num_asked[label] += 1
        rights = processes.total(num_right.values())
        asked = processes.total(num_asked.values())
        for label, share, count in zip(labels, rights, asked, strict=True):
            found[f"{name}/{label}"] = round(share / count, 4)
    return found


@torch.no_grad()
def divergence(
    student: Student,
    teacher: Teacher,
    packer: Packer,
    items: Sequence[LinkItem],
    processes: Processes,
    has_answers: bool,
) -> dict[str, float]:
    """Return the mean KL from full prefill along answers, with a writer and without it."""
    lost, count = [0.0, 0.0], 0.0
    rows = _ROWS * processes.count
    for start in range(0, len(items), rows):
        own, counts = processes.share(items[start : start + rows])
        answers = None if has_answers else teacher.answers(own)
        batch = packer.pack(own, linked=True, answers=answers)
        taught = teacher.logits(own, answers)
        for number, writes in enumerate((True, False)):
            found = student.logits(batch, writes=writes)
            lost[number] += counts * float(kl(found, taught))
        count += counts * len(taught)
    *lost, count = processes.total([*lost, count])
    return {f"KL/{name}": one / count for name, one in zip(("written", "plain"), lost, strict=True)}


def kl(found: torch.Tensor, taught: torch.Tensor) -> torch.Tensor:
    """Return the KL divergence from taught logits ``[tokens, vocabulary]``, summed."""
    return functional.kl_div(
        found.float().log_softmax(-1),
        taught.float().log_softmax(-1),
        reduction="sum",
        log_target=True,
    )


def right(logits: torch.Tensor, batch: LinkBatch) -> torch.Tensor:
    """Return for each question of a batch whether its whole answer is right, bool."""
    wanted = batch.targets != IGNORED
    return questions_right(logits.cpu(), batch.targets[wanted], batch.question_ids[wanted])
