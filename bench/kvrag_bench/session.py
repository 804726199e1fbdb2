"""`kvrag bench session`: turns of a conversation, with earlier turns kept and without.

One engine keeps the KV of earlier turns in memory, another in the store; a third keeps nothing.
All answer the same prompts. The first turn's prompt has all chunks; each later prompt is the one
before, its answer and a question.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from kvrag.engine.engine import KVEngine
from kvrag.engine.request import Prompt
from kvrag.errors import ParameterError, StoreError
from kvrag.fusion.report import FusionReport
from kvrag.ingest.index import Index
from kvrag_bench.setting import chosen_clock, require_one_thread, require_room, temporary_index
from kvrag_bench.shapes import chosen_model, random_text

_CHUNK_TOKENS = 200
_MOST_SECONDS = 60.0
"""Storing a turn takes no longer."""


@dataclass(frozen=True)
class SessionOptions:
    """What to measure.

    Attributes
    ----------
    model
        A model folder or name; None takes random weights of `shape`.
    shape
        A name in `kvrag_bench.shapes.SHAPES`.
    policy
        The policy of all turns.
    num_turns
        Turns of the conversation.
    num_chunks
        Chunks of 200 tokens in the first turn's prompt.
    question_tokens, num_tokens
        Tokens of each question, and of each answer.
    repeats
        Conversations, of which each turn's median is reported; one more runs first and does not
        count.
    processor_time
        Whether to count the process's processor time instead of the clock's, with one thread: on a
        machine that others use too.
    """

    model: str | None = None
    shape: str = "qwen2.5-0.5b"
    policy: str = "two_stage"
    num_turns: int = 20
    num_chunks: int = 4
    question_tokens: int = 30
    num_tokens: int = 32
    repeats: int = 3
    processor_time: bool = False

    def __post_init__(self) -> None:
        numbers = (self.num_chunks, self.question_tokens, self.num_tokens, self.repeats)
        if min(numbers) < 1 or self.num_turns < 2:
            raise ParameterError(
                "bench session: chunks, tokens and repeats must be 1 or more, turns 2 or more"
            )
        if self.processor_time:
            require_one_thread("session")


@dataclass(frozen=True)
class SessionRow:
    """One turn.

    Attributes
    ----------
    num_tokens, num_kept
        Tokens of the prompt, and those of them that were kept; the others are new.
    seconds
        Time to first token of the conversation's engine.
    stored_seconds
        That of an engine that reads the earlier turns back from the store.
    alone_seconds
        That of a prompt of as many tokens as were new.
    anew_seconds
        That of the same prompt in an engine that keeps nothing.
    ratio
        `seconds` over `alone_seconds`.
    kept_bytes
        Memory of what is kept after the turn.
    """

    model: str
    policy: str
    turn: int
    num_tokens: int
    num_kept: int
    seconds: float
    stored_seconds: float
    alone_seconds: float
    anew_seconds: float
    ratio: float
    kept_bytes: int


def run_session_bench(
    options: SessionOptions, say: Callable[[str], None] = lambda _: None
) -> list[SessionRow]:
    """Measure every turn.

    Raises
    ------
    ParameterError, ModelLoadError, UnsupportedModelError
        Before anything is timed.
    StoreError
        If the turns cannot be stored.
    """
    model = chosen_model(options.model, options.shape)
    each = options.question_tokens + options.num_tokens + 4
    needed = options.num_chunks * (_CHUNK_TOKENS + 2) + options.num_turns * each
    require_room(model, needed, "fewer turns or chunks")
    texts = [random_text(model, _CHUNK_TOKENS, seed=i) for i in range(options.num_chunks)]
    questions = [
        random_text(model, options.question_tokens, seed=len(texts) + turn)
        for turn in range(options.num_turns)
    ]
    with temporary_index(model, texts, _CHUNK_TOKENS) as index:
        runs = []
        for number in range(options.repeats + 1):
            say(f"conversation {number} of {options.repeats}")
            runs.append(_converse(index, texts, questions, options))
    turns = enumerate(zip(*runs[1:], strict=True))
    return [_row(model.name, turn, row, options) for turn, row in turns]


@dataclass(frozen=True)
class _Turn:
    report: FusionReport
    seconds: float
    stored_seconds: float
    alone_seconds: float
    anew_seconds: float
    kept_bytes: int


def _converse(
    index: Index, texts: list[str], questions: list[str], options: SessionOptions
) -> list[_Turn]:
    clock = chosen_clock(options.processor_time)
    load_threads = 0 if options.processor_time else None
    engine, storing, forgetful = (
        KVEngine(
            index,
            policy=options.policy,
            load_threads=load_threads,
            session_bytes=size,
            session_store_bytes=room,
        )
        for size, room in ((1 << 40, 0), (0, 1 << 40), (0, 0))
    )

    num_special = len(index.tokenizer("")["input_ids"])
    converses = bool(getattr(index.tokenizer, "chat_template", None))

    def ask(engine: KVEngine, prompt: Prompt, *, reuse: bool = True) -> tuple[float, FusionReport]:
        started = clock()
        report = engine.generate(prompt, max_tokens=1, reuse=reuse).report
        seconds = clock() - started
        wait_until_stored()
        return seconds, report

    def wait_until_stored() -> None:
        end = time.monotonic() + _MOST_SECONDS
        while not storing.stored_bytes:
            if time.monotonic() > end:
                raise StoreError(f"no turn is stored in {index.store.url}: is the disk full?")
            time.sleep(0.001)

    turns: list[_Turn] = []
    said = ["\n\n".join([*texts, questions[0]])]
    while True:
        prompt = _prompt(said, converses=converses)
        stored_seconds, _ = ask(storing, prompt)
        seconds, report = ask(engine, prompt)
        anew_seconds, _ = ask(forgetful, prompt)
        num_new = report.num_tokens - report.num_kept
        alone = random_text(index.model, num_new - num_special, seed=len(turns))
        alone_seconds, _ = ask(forgetful, alone, reuse=False)
        # The answer itself is not timed; its prompt takes everything that the one above has left.
        answer = engine.generate(prompt, max_tokens=options.num_tokens)
        storing.generate(prompt, max_tokens=options.num_tokens)
        wait_until_stored()
        kept_bytes = engine.kept_bytes
        turns.append(
            _Turn(report, seconds, stored_seconds, alone_seconds, anew_seconds, kept_bytes)
        )
        if len(turns) == len(questions):
            return turns
        said += [answer.text, questions[len(turns)]]


def _prompt(said: list[str], *, converses: bool) -> Prompt:
    """Return what user and model have said as a prompt."""
    if not converses:
        return "\n\n".join(said)
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(said)]


def _row(model: str, turn: int, runs: Sequence[_Turn], options: SessionOptions) -> SessionRow:
    seconds, stored, alone, anew = (
        median(getattr(run, name) for run in runs)
        for name in ("seconds", "stored_seconds", "alone_seconds", "anew_seconds")
    )
    last = runs[-1]
    return SessionRow(
        model=model,
        policy=options.policy,
        turn=turn + 1,
        num_tokens=last.report.num_tokens,
        num_kept=last.report.num_kept,
        seconds=seconds,
        stored_seconds=stored,
        alone_seconds=alone,
        anew_seconds=anew,
        ratio=seconds / alone,
        kept_bytes=last.kept_bytes,
    )
