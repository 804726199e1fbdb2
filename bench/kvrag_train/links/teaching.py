"""Who learns, and from whom: the untouched model's full prefill of plain prompts as a teacher."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig

from kvrag.models.kv_model import KVModel
from kvrag_bench.judge.questions import RenderedPrompt
from kvrag_train.batches import IGNORED
from kvrag_train.links.batch import Packer
from kvrag_train.links.data import LinkItem
from kvrag_train.links.options import LinkTrainingOptions
from kvrag_train.links.parameters import LinkParameters
from kvrag_train.links.processes import Processes
from kvrag_train.links.sharding import Running, shard
from kvrag_train.links.student import KV, Student


class Teacher:
    """Answers plain prompts.

    Parameters
    ----------
    model
        The untrained model.
    student
        Runs it.
    packer
        Makes the teacher's batches.
    end
        The token that ends an answer.
    answer_tokens
        Most tokens of a teacher's own answer.
    processes
        Processes that ask their teachers at the same time.
    """

    def __init__(
        self,
        model: KVModel,
        student: Student,
        packer: Packer,
        end: int,
        answer_tokens: int,
        processes: Processes,
    ) -> None:
        self._model = model
        self._student = student
        self._packer = packer
        self._end = end
        self._answer_tokens = answer_tokens
        self._processes = processes

    @torch.no_grad()
    def logits(
        self,
        items: Sequence[LinkItem],
        answers: Sequence[Sequence[int]] | None,
        kept: list[KV] | None = None,
    ) -> torch.Tensor:
        """Return logits ``[answer tokens, vocabulary]`` along given answers, or the items' own.

        `kept` receives what `Student.logits` says.
        """
        return self._student.logits(self._packer.pack(items, linked=False, answers=answers), kept)

    @torch.no_grad()
    def answers(self, items: Sequence[LinkItem]) -> list[list[int]]:
        """Return the greedy answers, ends included."""
        if self._processes.is_sharded:
            return self._answers_together(items)
        return [self._answer(prompt) for item in items for prompt in item.prompts]

    def _answer(self, prompt: RenderedPrompt) -> list[int]:
        ids = torch.tensor([prompt.token_ids(self._model.tokenizer)], device=self._model.device)
        greedy = GenerationConfig(  # type: ignore[no-untyped-call]
            max_new_tokens=self._answer_tokens - 1,
            do_sample=False,
            eos_token_id=self._end,
            pad_token_id=self._end,
        )
        hf: Any = self._model.hf
        written = hf.generate(ids, attention_mask=torch.ones_like(ids), generation_config=greedy)
        answer: list[int] = written[0, ids.shape[1] :].tolist()
        return answer if answer[-1:] == [self._end] else [*answer, self._end]

    def _answers_together(self, items: Sequence[LinkItem]) -> list[list[int]]:
        """Return the same where a model's weights are shared among processes.

        Each token is computed from the whole prompt, so that all processes compute in step.
        """
        end = self._end
        num_questions = sum(len(item.prompts) for item in items)
        answers: list[list[int]] = [[] for _ in range(num_questions)]
        for _ in range(self._answer_tokens - 1):
            open_ones = [i for i, answer in enumerate(answers) if answer[-1:] != [end]]
            # A process with finished answers continues until all processes have theirs.
            if not self._processes.total([len(open_ones)])[0]:
                break
            # What stands last is what is predicted; it is fed to nobody.
            asked = [answer if answer[-1:] == [end] else [*answer, end] for answer in answers]
            batch = self._packer.pack(items, linked=False, answers=asked)
            likeliest = self._student.logits(batch).argmax(-1).tolist()
            numbers = batch.question_ids[batch.targets != IGNORED].tolist()
            last = dict(zip(numbers, likeliest, strict=True))
            for number in open_ones:
                answers[number].append(last[number])
        return [answer if answer[-1:] == [end] else [*answer, end] for answer in answers]


def make_students(
    model: KVModel,
    parameters: LinkParameters,
    packer: Packer,
    options: LinkTrainingOptions,
    processes: Processes,
    precision: str,
) -> tuple[Student, Teacher | None]:
    """Return who learns, and whom the loss asks; their models are shared among processes.

    Parameters
    ----------
    model, parameters, packer
        What learns, and its batches. A teacher of one that is tuned is a copy of it as it is now.
    options, processes, precision
        Of the run.
    """
    is_tuned, is_taught = options.mode == "tuned", options.loss == "distill"
    untouched = model
    if is_tuned and is_taught:
        untouched = KVModel(copy.deepcopy(model.hf), model.tokenizer)

    def shared(shown: KVModel, learns: bool) -> Running | None:
        if not processes.is_sharded:
            return None
        return shard(shown.hf, processes, learns=learns, precision=precision)

    running = shared(model, is_tuned)
    student = Student(model, parameters, is_tuned, running)
    if not is_taught:
        return student, None
    if untouched is not model:
        running = shared(untouched, False)
    teacher = Teacher(
        untouched,
        Student(untouched, parameters, False, running),
        packer,
        int(model.tokenizer.eos_token_id),
        options.answer_tokens,
        processes,
    )
    return student, teacher
