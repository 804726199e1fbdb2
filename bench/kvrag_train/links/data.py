"""Training data for links: prompts over documents, and their answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from random import Random
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from kvrag.chunk import content_hash, normalise_text
from kvrag.errors import ParameterError
from kvrag.fusion.segments import MIN_LENGTH
from kvrag_bench.corpora import one_layer
from kvrag_bench.judge.questions import JudgedQuestion, RenderedPrompt, render
from kvrag_bench.quality.datasets import GENERATED, load_questions, load_suite
from kvrag_bench.quality.retrieved import retrieve
from kvrag_corpus import generate_corpus
from kvrag_corpus.names import NameSource
from kvrag_train.batches import Item
from kvrag_train.curriculum import STAGES, choose_prompt, sample_items
from kvrag_train.evaluate import corpus_items
from kvrag_train.prompts import CHAT_USER

REAL = "real"
"""Questions over invented people and firms in prose, as in `kvrag bench quality --suite`."""

# Their seed is none that anything is judged with.
_REAL_SETS = ("biography:2", "biography:4", "carried", "bridge")
_REAL_SEED, _REAL_QUESTIONS_PER_SET = 7_000_001, 500

# Passages of a folder's pages that each question gets, and their longest.
_PAGES_AT_ONCE, _PASSAGE_TOKENS, _MOST_OF_PAGES = (4,), 256, 4_000

# Share of a file's questions that are never trained on, and their greatest number.
_HELD_OUT_SHARE, _MOST_HELD_OUT = 10, 500


@dataclass(frozen=True)
class LinkItem:
    """Documents, and prompts that ask about them: all begin alike, and differ after them.

    Attributes
    ----------
    texts
        The documents, normalised, as every prompt has them.
    prompts
        At least one.
    answers
        The answer after each prompt, including its leading blank.
    types
        What each question needs, as the data set says.
    """

    texts: tuple[str, ...]
    prompts: tuple[RenderedPrompt, ...]
    answers: tuple[str, ...]
    types: tuple[str, ...]


class Source(Protocol):
    """A source of items."""

    @property
    def digest(self) -> str:
        """Digest of everything that the items are made of."""

    def draw(self, rng: Random, num_rows: int, num_questions: int) -> list[LinkItem]:
        """Return items to train on, by `rng` alone, of up to `num_questions` prompts each."""

    def held_out(self, num_questions: int) -> list[LinkItem]:
        """Return items that are never drawn, of about `num_questions` prompts in all."""


class GeneratedSource:
    """The corpus generator's training split, as kvrag-tiny was trained on it.

    Documents have a random order in which a continuation follows its predecessor; a file's
    continuation says "she" for the person that the chunk before named.
    """

    @property
    def digest(self) -> str:
        """The generator's name: for each seed it always makes the same items."""
        return GENERATED

    def draw(self, rng: Random, num_rows: int, num_questions: int) -> list[LinkItem]:
        """Return fresh items of the last stage, all of one number of documents and one format."""
        stage = STAGES[-1]
        count, prompt_format = choose_prompt(stage, rng)
        names = NameSource("train", rng)
        items = sample_items(stage, names, count, prompt_format, num_rows, num_questions, rng)
        return [_of_corpus(item) for item in items]

    def held_out(self, num_questions: int) -> list[LinkItem]:
        """Return questions of the validation split, in the format of a chat's user."""
        corpus = generate_corpus(0, "validation", num_questions)
        return [_of_corpus(item) for item in corpus_items(corpus, CHAT_USER)]


def _of_corpus(item: Item) -> LinkItem:
    return LinkItem(
        texts=tuple(map(normalise_text, item.documents)),
        prompts=tuple(
            RenderedPrompt(item.format.render(item.documents, question.text), True)
            for question in item.questions
        ),
        answers=tuple(f" {question.full_answer}" for question in item.questions),
        types=tuple(str(question.type) for question in item.questions),
    )


class FileSource:
    """Questions of a data set in MuSiQue or LongBench layout.

    Documents are shuffled again each time (KVLink §4.1: a model trained on the order of relevance
    looks only at the front), except where `keep_order` says that their order matters.

    Parameters
    ----------
    questions
        All of them; those whose documents are all too short to be found are left out, and one in
        ten of the others is held out.
    tokenizer
        Its chat template renders the prompts, if it has one.
    keep_order
        Keep the data set's order of documents.
    answer_prefix
        Text between prompt and answer; None: nothing in a chat, otherwise a blank.

    Attributes
    ----------
    digest
        Digest of all questions.
    """

    def __init__(
        self,
        questions: Sequence[JudgedQuestion],
        tokenizer: PreTrainedTokenizerBase,
        *,
        keep_order: bool = False,
        answer_prefix: str | None = None,
    ) -> None:
        long_enough = [
            question
            for question in questions
            if any(len(text) >= MIN_LENGTH for text in question.texts)
        ]
        if len(long_enough) < 2:
            raise ParameterError(
                f"questions to train on: found {len(long_enough)} of {len(questions)} with a "
                f"document of at least {MIN_LENGTH} characters, expected at least 2, one of them "
                "to be held out"
            )
        self.digest = content_hash(repr(long_enough))
        self._tokenizer = tokenizer
        self._keep_order = keep_order
        if answer_prefix is None:
            answer_prefix = "" if getattr(tokenizer, "chat_template", None) else " "
        self._answer_prefix = answer_prefix
        mixed = long_enough
        Random("held out").shuffle(mixed)
        num_held_out = min(_MOST_HELD_OUT, max(1, len(mixed) // _HELD_OUT_SHARE))
        self._held_out, rest = mixed[:num_held_out], mixed[num_held_out:]
        # Questions about the same documents are asked together.
        rest.sort(key=lambda question: question.texts)
        self._groups = [
            list(group) for _, group in groupby(rest, key=lambda question: question.texts)
        ]

    def draw(self, rng: Random, num_rows: int, num_questions: int) -> list[LinkItem]:
        """Return items of randomly drawn groups."""
        items = []
        for group in rng.choices(self._groups, k=num_rows):
            asked = rng.sample(group, min(len(group), num_questions))
            texts = list(asked[0].texts)
            if not self._keep_order:
                rng.shuffle(texts)
            items.append(self._item(asked, texts))
        return items

    @property
    def texts(self) -> list[str]:
        """All documents, normalised, each once."""
        asked = [*self._held_out, *(one for group in self._groups for one in group)]
        return list(dict.fromkeys(text for one in asked for text in one.texts))

    def held_out(self, num_questions: int) -> list[LinkItem]:
        """Return the held-out questions, in the data set's order of documents."""
        return [self._item([q], q.texts) for q in self._held_out[:num_questions]]

    def _item(self, asked: Sequence[JudgedQuestion], texts: Iterable[str]) -> LinkItem:
        documents = tuple(texts)
        return LinkItem(
            texts=documents,
            prompts=tuple(render(q.question, documents, self._tokenizer, True) for q in asked),
            answers=tuple(f"{self._answer_prefix}{q.answers[-1]}" for q in asked),
            types=tuple(q.type for q in asked),
        )


def open_source(
    data: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    keep_order: bool = False,
    answer_prefix: str | None = None,
) -> Source:
    """Return ``"generated"`` or ``"real"`` questions, a file's, or those of a folder of pages.

    Raises as `load_questions` and `retrieve` do.
    """
    if data == GENERATED:
        return GeneratedSource()
    if data == REAL:
        questions = load_suite(
            _REAL_SETS, seed=_REAL_SEED, num_questions_per_set=_REAL_QUESTIONS_PER_SET
        )
    elif Path(data).is_dir():
        found = retrieve(
            data,
            one_layer(tokenizer),
            _PAGES_AT_ONCE,
            _PASSAGE_TOKENS,
            seed=_REAL_SEED,
            num_questions=_MOST_OF_PAGES,
        )
        questions = list(found.questions)
    else:
        questions = load_questions(data)
    return FileSource(questions, tokenizer, keep_order=keep_order, answer_prefix=answer_prefix)
