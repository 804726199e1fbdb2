"""A prompt that goes on from an earlier one takes its KV, and answers as if it were fused anew."""

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrag.engine.engine import KVEngine
from kvrag.engine.request import Prompt
from kvrag.errors import PromptTooLongError
from kvrag.fusion.policies.base import PromptRows, RecomputePolicy
from kvrag.fusion.report import FusionReport
from kvrag.fusion.slices import whole
from kvrag.ingest.index import Index
from kvrag.models.kv_model import KVModel
from kvrag.models.rows import RowRunner
from kvrag_testing.bench_top import TEXTS, relative_difference
from tests.support.models import HEAD, make_model, make_tokenizer
from tests.support.properties import examples, few
from tests.support.rag import text_index

QUESTIONS = ("Who keeps it?", "Where is the old tower?", "When did she say so, and why?")


@dataclass(frozen=True)
class Asked:
    """An answer, with the logits of its first token and the tokens that were recomputed for it."""

    logits: torch.Tensor
    text: str
    report: FusionReport
    picks: tuple[int, ...]


def ask(engine: KVEngine, prompt: Prompt, **options: Any) -> Asked:
    """Answer a prompt as the scheduler does."""
    answer = whole(engine._start_now(prompt, options).fuse(time.perf_counter(), None))
    logits, fused = answer.logits.clone(), answer._fused
    pieces = answer.take()
    while not answer.is_done:
        answer.logits = answer.decoder.step(answer.token)
        pieces += answer.take()
    report = fused.report
    picks = tuple(fused.picks[-1].tolist())
    answer.close()
    check_counts(report)
    return Asked(logits, "".join(piece.text for piece in pieces), report, picks)


def check_counts(report: FusionReport) -> None:
    kinds = ("kept", "exact", "reused", "recomputed", "fresh")
    assert sum(getattr(report, f"num_{kind}") for kind in kinds) == report.num_tokens
    assert sum(report.fresh_reasons.values()) in (0, report.num_fresh)


def root_of(order: Sequence[int], question: str) -> str:
    """Return a prompt whose first chunk is exact."""
    return HEAD + "\n\n".join([*(TEXTS[i] for i in order), f"Question: {question}\nAnswer:"])


def next_of(prompt: str, answer: str, order: Sequence[int], question: str) -> str:
    return "\n\n".join([prompt + answer, *(TEXTS[i] for i in order), f"Question: {question}"])


# -- the same prompt has the same answer ---------------------------------------------------------


class Conversations:
    """Conversations that branch, with one engine, and each of them again with an engine alone."""

    def __init__(self, index: Index, policy: str) -> None:
        self.index = index
        self.options = {"policy": policy, "max_tokens": 5}
        self.engine = KVEngine(index)
        self.reads = False  # Whether what is kept has to come from the store.
        # A prompt and the prompts that it goes on from, to its answer.
        self._alone: dict[tuple[str, ...], Asked] = {}

    def alone(self, chain: tuple[str, ...]) -> Asked:
        """Return the answer of an engine that was asked nothing else."""
        if chain not in self._alone:
            engine = KVEngine(self.index, session_bytes=0 if len(chain) == 1 else 1 << 30)
            for prompt in chain:
                asked = ask(engine, prompt, **self.options)
            self._alone[chain] = asked
        return self._alone[chain]

    def check(self, chain: tuple[str, ...]) -> Asked:
        asked, expected = ask(self.engine, chain[-1], **self.options), self.alone(chain)
        assert relative_difference(asked.logits, expected.logits) < 1e-4
        assert asked.text == expected.text
        assert not asked.report.misses
        return asked

    def play(self, data: st.DataObject, most: int, look: Callable[[], int] = lambda: 1) -> None:
        """Let conversations go on, branch, be edited and asked again, in any order.

        Parameters
        ----------
        look
            Whether an earlier answer's rows may be found outside memory; asked before each prompt.
        """
        orders = st.lists(st.integers(0, len(TEXTS) - 1), max_size=3, unique=True)
        questions = st.sampled_from(QUESTIONS)
        chains: list[tuple[str, ...]] = []
        for _ in range(data.draw(st.integers(2, most))):
            move = data.draw(st.sampled_from(["begin", "go on", "go on", "again"]))
            order, question = data.draw(orders), data.draw(questions)
            if move == "begin" or not chains:
                chain: tuple[str, ...] = (root_of(order, question),)
            else:
                chain = data.draw(st.sampled_from(chains))
                if move == "go on":
                    answer = self.alone(chain).text
                    chain = (*chain, next_of(chain[-1], answer, order, question))
            stored = look()
            report = self.check(chain).report
            if chain in chains or len(chain) > 1:
                assert report.num_kept > 0
                assert stored
                assert report.bytes_loaded > 0 or not self.reads
            chains.append(chain)


@pytest.fixture(
    scope="module",
    params=few(
        3,
        [
            *("two_stage", "query:ratio=0.5", "boundary:ratio=0.3", "none", "deviation"),
            *("boundary", "two_stage:look=0.67"),
        ],
    ),
)
def conversations(request: pytest.FixtureRequest, index: Index) -> Conversations:
    return Conversations(index, request.param)


@settings(max_examples=examples(25), deadline=None)
@given(data=st.data())
def test_an_answer_depends_only_on_the_prompts_that_its_own_begins_with(
    conversations: Conversations, data: st.DataObject
) -> None:
    conversations.engine = KVEngine(conversations.index)
    conversations.play(data, 8)


@pytest.mark.parametrize("policy", ["two_stage", "two_stage:look=0.67", "none"])
@pytest.mark.parametrize("compute", ["float32", "int8"])
def test_the_same_prompt_again_is_the_same_to_the_bit(
    policy: str, compute: str, tmp_path: Path
) -> None:
    model = KVModel(make_model(), make_tokenizer(), compute=compute)
    with text_index(tmp_path / "index", model) as index:
        engine = KVEngine(index, policy=policy, max_tokens=6)
        prompt = root_of((1, 0, 2), QUESTIONS[0])
        first = ask(engine, prompt)
        assert first.picks or policy == "none"
        longer = next_of(prompt, first.text, (), QUESTIONS[1])
        second = ask(engine, longer)
        # The first one is the beginning of what is kept then; a twin is taken from memory as well.
        for asked, expected in ((prompt, first), (prompt, first), (longer, second)):
            again = ask(engine, asked)
            assert again.report.num_kept == again.report.num_tokens
            assert torch.equal(again.logits, expected.logits)
            assert again.text == expected.text


def test_an_edited_question_takes_no_repair_of_another(index: Index) -> None:
    engine = KVEngine(index, max_tokens=4)
    first, edited = (root_of((1, 0, 2), question) for question in QUESTIONS[:2])
    ask(engine, first)
    again = ask(engine, edited)
    # The head, and the first chunk, which is exact.
    num_exact = len(engine.prompt_ids(HEAD + TEXTS[1]))
    assert num_exact - 2 <= again.report.num_kept <= num_exact + 3
    assert again.picks
    # Without a repair, what was loaded for one question is right for another.
    ask(engine, first, policy="none")
    assert ask(engine, edited, policy="none").report.num_kept > 100


def test_another_policy_takes_no_repair(index: Index) -> None:
    engine = KVEngine(index, max_tokens=4)
    prompt = root_of((1, 0, 2), QUESTIONS[0])
    asked = ask(engine, prompt)
    longer = next_of(prompt, asked.text, (), QUESTIONS[1])
    whole_again = ask(engine, longer, ratio=1.0)
    assert whole_again.report.num_reused == 0
    assert whole_again.report.num_recomputed > 50
    plain = ask(engine, longer, reuse=False)
    assert plain.report.num_kept == 0
    assert relative_difference(whole_again.logits, plain.logits) < 1e-4


# -- a next turn is as if fused anew, with the same picks ----------------------------------------


@dataclass(frozen=True)
class GivenPicks(RecomputePolicy):
    """Recomputes given tokens."""

    name = "given"
    picks: tuple[int, ...]

    def __post_init__(self) -> None:
        """Take any tokens."""

    def candidates(self, prompt: PromptRows) -> torch.Tensor:
        assert set(self.picks) <= set(prompt.reused().tolist())
        return torch.tensor(self.picks, dtype=torch.long)


@pytest.mark.parametrize(
    "family", few(3, ["gemma3", "gpt2", "falcon-alibi", "llama", "mistral-sliding"])
)
def test_turns_are_as_if_fused_anew_with_the_same_picks(family: str, tmp_path: Path) -> None:
    with text_index(tmp_path / "index", family) as index:
        model = index.model
        engine = KVEngine(index, policy="query", ratio=0.3, max_tokens=6)
        prompt, picks = root_of((1, 0, 2), QUESTIONS[0]), list[int]()
        order: tuple[int, ...] = ()
        for number, following in enumerate([(), (3,), (2, 1), ()]):
            asked = ask(engine, prompt)
            picks += asked.picks
            assert bool(asked.picks) is (not model.is_position_bound and not (number and not order))
            anew = engine.fuse(prompt, policy=GivenPicks(tuple(picks)))
            assert anew.report.num_kept == 0
            assert relative_difference(asked.logits, anew.logits) < 1e-4
            earlier, order = prompt, following
            prompt = next_of(prompt, asked.text, order, QUESTIONS[number % 3])
        last = ask(engine, prompt)
        assert last.report.num_kept >= len(engine.prompt_ids(earlier))


# -- memory --------------------------------------------------------------------------------------


def kept_of(engine: KVEngine) -> list[Any]:
    return [kept for _, kept in engine._fuser.sessions._kept]


def test_memory_is_bounded_and_the_oldest_go_first(index: Index) -> None:
    prompts = [root_of((i % 4, (i + 1) % 4), question) for i in range(4) for question in QUESTIONS]
    one = KVEngine(index, max_tokens=4)
    one.generate(prompts[0])
    size = one._fuser.sessions.size_bytes
    engine = KVEngine(index, max_tokens=4, session_bytes=3 * size)
    for prompt in prompts:
        engine.generate(prompt)
        assert engine._fuser.sessions.size_bytes <= 3 * size
    assert len(kept_of(engine)) >= 2
    assert engine.generate(prompts[-1]).report.num_kept > 50
    assert engine.generate(prompts[0]).report.num_kept < 20


@pytest.mark.parametrize("session_bytes", [0, 1000])
def test_without_room_nothing_is_kept(index: Index, session_bytes: int) -> None:
    engine = KVEngine(index, max_tokens=4, session_bytes=session_bytes)
    prompt = root_of((0, 1), QUESTIONS[0])
    engine.generate(prompt)
    assert engine.generate(prompt).report.num_kept == 0
    assert engine._fuser.sessions.size_bytes == 0


@pytest.mark.parametrize(
    "options", [{"reuse": False}, {"eviction": "streaming:recent=16"}, {"ttft": 30.0}], ids=str
)
def test_what_cannot_be_kept_is_not(index: Index, options: dict[str, Any]) -> None:
    engine = KVEngine(index, max_tokens=4)
    prompt = root_of((0, 1), QUESTIONS[0])
    engine.generate(prompt, **options)
    assert kept_of(engine) == []
    engine.generate(prompt)
    assert engine.generate(prompt, **options).report.num_kept == 0
    assert len(kept_of(engine)) == 1


# -- answers that end early ----------------------------------------------------------------------


def test_an_answer_that_is_left_still_leaves_its_rows(index: Index) -> None:
    engine = KVEngine(index, max_tokens=20)
    prompt = root_of((0, 1), QUESTIONS[0])
    stream = engine.stream(prompt)
    text = "".join(next(stream).text for _ in range(3))
    stream.close()  # type: ignore[attr-defined]
    num_prompt = len(engine.prompt_ids(prompt))
    assert engine.generate(prompt + text + " And then?").report.num_kept >= num_prompt


def test_an_error_in_fusing_leaves_the_conversation(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = KVEngine(index, max_tokens=4)
    prompt = root_of((0, 1), QUESTIONS[0])
    first = engine.generate(prompt)
    longer = next_of(prompt, first.text, (2,), QUESTIONS[1])
    expected = KVEngine(index, max_tokens=4)
    expected.generate(prompt)
    with pytest.raises(PromptTooLongError):
        engine.generate(next_of(prompt, first.text, (), "why? " * 2000))
    calls, forward = count(), RowRunner.forward

    def failing(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == 1:
            raise RuntimeError("no memory")
        return forward(*args, **kwargs)

    monkeypatch.setattr(RowRunner, "forward", failing)
    with pytest.raises(RuntimeError):
        engine.generate(longer)
    monkeypatch.undo()
    again = engine.generate(longer)
    assert again.report.num_kept >= first.usage.prompt_tokens
    assert again.text == expected.generate(longer).text


def test_an_error_in_an_answer_leaves_nothing(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = KVEngine(index, max_tokens=8)
    stream = engine.stream(root_of((0, 1), QUESTIONS[0]))
    next(stream)

    def failing(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no memory")

    monkeypatch.setattr(KVModel, "forward_each", failing)
    with pytest.raises(RuntimeError):
        list(stream)
    assert not engine._fuser.sessions._kept


def test_an_edited_prompt_that_begins_with_a_chunk(tmp_path: Path) -> None:
    tokenizer = copy.deepcopy(make_tokenizer())
    tokenizer.backend_tokenizer.post_processor = None  # a chunk begins the prompt, not <bos>
    model = KVModel(make_model(), tokenizer)
    with text_index(tmp_path / "index", model) as index:
        engine = KVEngine(index, policy="none", max_tokens=4)
        first, edited = (
            "\n\n".join((*TEXTS[:2], f"Question: {question}")) for question in QUESTIONS[:2]
        )
        assert ask(engine, first).report.num_reused > 20
        again = ask(engine, edited)
        assert again.report.num_kept > len(engine.prompt_ids("\n\n".join(TEXTS[:2])))
        alone = ask(KVEngine(index, session_bytes=0), edited, policy="none", max_tokens=4)
        assert relative_difference(again.logits, alone.logits) < 1e-4


def test_lost_records_do_not_matter_to_kept_rows(tmp_path: Path, model: KVModel) -> None:
    with text_index(tmp_path / "index", model) as index:
        engine = KVEngine(index, max_tokens=4)
        prompt = root_of((0, 1), QUESTIONS[0])
        first = engine.generate(prompt)
        index.delete(sources=["text-1"])
        second = engine.generate(next_of(prompt, first.text, (), QUESTIONS[1]))
        assert second.report.num_kept >= first.usage.prompt_tokens
        # Anew, the chunk is not found, so its repair is not taken either.
        again = engine.generate(root_of((0, 1), QUESTIONS[2])).report
        assert 0 < again.num_kept <= len(engine.prompt_ids(HEAD + TEXTS[0] + "\n\n"))
        assert again.num_kept + again.num_fresh == again.num_tokens
