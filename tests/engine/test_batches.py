"""Answers written together are those written one after the other, and disturb nobody."""

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrag.engine.engine import KVEngine
from kvrag.engine.open_answer import OpenAnswer
from kvrag.engine.prompt_reader import PromptReader
from kvrag.engine.request import Request
from kvrag.errors import ParameterError, PromptTooLongError, RecordError
from kvrag.fusion.decoding import RowDecoder
from kvrag.fusion.loader import SpanLoader
from kvrag.fusion.report import FusionReport
from kvrag.fusion.slices import whole
from kvrag.ingest.index import Index
from kvrag.kvcache import FusedKV
from kvrag.models.kv_model import KVModel
from kvrag.models.rows import RowRunner
from kvrag_testing.bench_top import TEXTS
from tests.support.properties import examples
from tests.support.rag import text_index
from tests.support.waiting import wait_until

PROMPTS = [
    f"{TEXTS[i % len(TEXTS)]}\n\n{TEXTS[(2 * i + 1) % len(TEXTS)]}\n\nWho keeps it {i}?"
    for i in range(6)
]
# What may differ between the requests of one batch.
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "seed": 3, "top_p": 0.9},
    {"repetition_penalty": 1.3, "policy": "none"},
    {"max_tokens": 3},
    {"stop": ["e"]},
    {"eviction": "streaming:recent=16"},
    {"policy": "query:shift=0.8"},
    {"reuse": False},
    {"temperature": 1.2, "seed": 4, "top_k": 5, "policy": "boundary"},
    {"frequency_penalty": 1.5, "presence_penalty": 0.5},
    {"temperature": 1.1, "seed": 5, "min_p": 0.2, "presence_penalty": 2.0},
]


@pytest.fixture(scope="module")
def engine(index: Index) -> KVEngine:
    return KVEngine(index, max_tokens=10, max_batch=3)


def threads_left() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name == "kvrag-batch"]


def request_of(number: int, kind: int) -> Request:
    return Request(PROMPTS[number % len(PROMPTS)], **KINDS[kind])


class Alone(dict[tuple[int, int], str]):
    """The answer to a prompt, for a kind of request, of an engine that answers nothing else."""

    def __init__(self, index: Index) -> None:
        self._engine = KVEngine(index, max_tokens=10)

    def __missing__(self, place: tuple[int, int]) -> str:
        return self.setdefault(place, self._engine.generate(request_of(*place)).text)


@pytest.fixture(scope="module")
def alone(index: Index) -> Alone:
    answers = Alone(index)
    assert all(answers[number, 0] for number in range(len(PROMPTS)))
    return answers


@settings(max_examples=examples(15), deadline=None)
@given(data=st.data())
def test_any_interleaving_of_streams_gives_the_same_texts(
    engine: KVEngine, alone: Alone, data: st.DataObject
) -> None:
    """Streams begin, advance, and are left at any time, in one thread."""
    streams: dict[int, tuple[tuple[int, int], Iterator[Any]]] = {}
    texts: dict[int, str] = {}
    begun = 0
    for _ in range(data.draw(st.integers(5, 40))):
        move = data.draw(st.sampled_from(["begin", "read", "read", "read", "leave"]))
        if move == "begin" or not streams:
            place = (
                data.draw(st.integers(0, len(PROMPTS) - 1)),
                data.draw(st.integers(0, len(KINDS) - 1)),
            )
            streams[begun], texts[begun] = (place, engine.stream(request_of(*place))), ""
            begun += 1
            continue
        number = data.draw(st.sampled_from(sorted(streams)))
        place, stream = streams[number]
        if move == "leave":
            stream.close()  # type: ignore[attr-defined]
            assert alone[place].startswith(texts[number])
            del streams[number]
            continue
        delta = next(stream)
        texts[number] += delta.text
        if delta.answer is not None:
            assert texts[number] == delta.answer.text == alone[place]
            del streams[number]
    for number, (place, stream) in streams.items():
        assert texts[number] + "".join(one.text for one in stream) == alone[place]
    assert engine._scheduler.num_open == 0


def test_damage_in_one_prompt_harms_no_other_that_is_fused_beside_it(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = KVEngine(index, max_tokens=2, session_bytes=0, load_threads=1)
    alone = [engine.generate(prompt, policy="none") for prompt in PROMPTS[:3]]
    place = SpanLoader._place
    cursed: list[Any] = []

    def damaged(self: SpanLoader, spans: Any, layer_index: int, *given: Any) -> None:
        if layer_index == 1 and not cursed:
            cursed.append(self)
            raise RecordError("a layer of one record is damaged")
        place(self, spans, layer_index, *given)

    monkeypatch.setattr(SpanLoader, "_place", damaged)
    together = engine.generate_batch(PROMPTS[:3], policy="none")
    misses = [bool(one.report.misses) for one in together]
    assert misses.count(True) == 1
    for was_lost, one, other in zip(misses, together, alone, strict=True):
        assert was_lost or one.text == other.text


@pytest.mark.parametrize("family", ["gemma3", "gpt2", "falcon-alibi", "mistral-sliding"])
def test_families(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy answers in float32 are the same, whether or not rows go together."""
    sizes = []
    step_each = RowDecoder.step_each

    def counted(decoders: Any, token_ids: Any) -> Any:
        sizes.append(len(decoders))
        return step_each(decoders, token_ids)

    with text_index(tmp_path / "index", family) as index:
        engine = KVEngine(index, max_tokens=6)
        for policy in ("none", "two_stage", "boundary", "gradual", "query:shift=0.8"):
            one_by_one = [engine.generate(prompt, policy=policy) for prompt in PROMPTS]
            monkeypatch.setattr(RowDecoder, "step_each", staticmethod(counted))
            together = engine.generate_batch(PROMPTS, policy=policy)
            monkeypatch.undo()
            assert [one.text for one in together] == [one.text for one in one_by_one]
    assert (max(sizes, default=0) > 1) is not index.model.family.attends_itself


def test_one_bad_request_harms_nobody(engine: KVEngine, alone: Alone) -> None:
    asked: list[Any] = [PROMPTS[0], 5, "word " * 3000, PROMPTS[1]]
    answers: list[Any] = engine.generate_batch(asked, return_exceptions=True)
    assert [answers[0].text, answers[3].text] == [alone[0, 0], alone[1, 0]]
    assert isinstance(answers[1], ParameterError)
    assert isinstance(answers[2], PromptTooLongError)
    with pytest.raises(ParameterError, match="found int 5"):
        engine.generate_batch(asked)
    for one in (PROMPTS[0], None, 5, {"a": 1}):
        with pytest.raises(ParameterError, match="put the prompt into a list"):
            engine.generate_batch(one)  # type: ignore[arg-type]
    assert engine.generate_batch([]) == []
    assert engine._scheduler.num_open == 0


def test_an_error_of_a_step_ends_only_its_answer(
    engine: KVEngine, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = KVModel.forward_each
    failing: set[int] = set()

    def breaking(self: KVModel, token_ids: Any, rows: Any) -> Any:
        if not failing:
            failing.add(id(rows[0].fused))
        if any(id(row.fused) in failing for row in rows):
            raise RuntimeError("this row is cursed")
        return forward(self, token_ids, rows)

    monkeypatch.setattr(KVModel, "forward_each", breaking)
    answers: list[Any] = engine.generate_batch(PROMPTS[:3], return_exceptions=True)
    assert str(answers[0]) == "this row is cursed"
    assert [one.text for one in answers[1:]] == [alone[1, 0], alone[2, 0]]


def test_a_prompt_is_read_beside_running_answers(
    engine: KVEngine, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading may take seconds, and neither answers nor prompts behind it wait for that."""
    may_read = threading.Event()
    lay_out = PromptReader.lay_out

    def slow(self: PromptReader, request: Request, *more: Any) -> Any:
        assert request.prompt != PROMPTS[1] or may_read.wait(60)
        return lay_out(self, request, *more)

    monkeypatch.setattr(PromptReader, "lay_out", slow)

    async def main() -> str:
        late, left = (asyncio.create_task(engine.agenerate(PROMPTS[1])) for _ in range(2))
        for number in (0, 2):
            assert (await engine.agenerate(PROMPTS[number])).text == alone[number, 0]
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        assert not late.done()
        may_read.set()
        return (await late).text

    assert asyncio.run(main()) == alone[1, 0]
    _wait_until_idle(engine)


def test_a_closed_stream_frees_its_buffer(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = KVEngine(index, max_tokens=20, session_bytes=0)
    buffers: list[weakref.ref[FusedKV]] = []
    made = FusedKV.__init__

    def noted(self: FusedKV, *given: Any, **named: Any) -> None:
        made(self, *given, **named)
        buffers.append(weakref.ref(self))

    monkeypatch.setattr(FusedKV, "__init__", noted)
    streams = [engine.stream(prompt) for prompt in PROMPTS[:3]]
    for stream in streams:
        next(stream)
    half = engine._start_now(PROMPTS[3], {}).fuse(0.0, None)
    while len(buffers) < 4:
        next(half)  # fused in part
    for stream in [*streams, half]:
        stream.close()  # type: ignore[attr-defined]
    del stream, streams, half
    assert len(buffers) == 4
    # A thread that reads a record ahead may hold its buffer for a moment.

    def are_freed() -> bool:
        gc.collect()
        return [one() for one in buffers] == [None] * 4

    wait_until(are_freed)
    assert engine._scheduler.num_open == 0


def test_a_cancelled_task_leaves_the_batch(engine: KVEngine, alone: Alone) -> None:
    async def main() -> str:
        other = asyncio.create_task(engine.agenerate(PROMPTS[1]))
        cancelled = asyncio.create_task(engine.agenerate(PROMPTS[0], max_tokens=500))
        stream = engine.astream(PROMPTS[2], max_tokens=500)
        await anext(stream)
        await stream.aclose()
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        with pytest.raises(ParameterError, match="max_tokens"):
            await engine.agenerate(PROMPTS[0], max_tokens=0)
        return (await other).text

    assert asyncio.run(main()) == alone[1, 0]
    _wait_until_idle(engine)


def test_an_interrupt_loses_nothing(
    engine: KVEngine, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C may come in the middle of a step, or of a prompt that another thread waits for."""
    stream = engine.stream(PROMPTS[0])
    text = next(stream).text
    for of, method in ((KVModel, "forward_each"), (RowRunner, "forward")):
        with monkeypatch.context() as patch:
            patch.setattr(of, method, _interrupt)
            with pytest.raises(KeyboardInterrupt):
                engine.generate(PROMPTS[1], reuse=False)
    assert text + "".join(one.text for one in stream) == alone[0, 0]
    assert engine._scheduler.num_open == 0


def _interrupt(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def _wait_until_idle(engine: KVEngine) -> None:
    for one in threading.enumerate():
        if one.name == "kvrag-batch":
            one.join(120)
    assert not threads_left()
    assert engine._scheduler.num_open == 0


# How prompts that are fused beside each other may differ.
REPAIRS: list[dict[str, Any]] = [
    *({"policy": name} for name in ("none", "two_stage", "boundary", "gradual", "query")),
    {"policy": "deviation", "ratio": 1.0},
    {"policy": "query:shift=0.8"},
    {"reuse": False},
]


def fused_of(answer: OpenAnswer) -> tuple[list[torch.Tensor], FusionReport]:
    """Return an answer's first logits and its prompt's KV, and give the buffer back."""
    kv = answer._fused.kv
    rows = [one[0, :, : kv.num_tokens].clone() for one in (*kv.keys, *kv.values)]
    report = replace(answer._fused.report, seconds={}, hidden_load_seconds=0.0)
    found = [answer.logits.clone(), *rows]
    answer.close()
    return found, report


@settings(max_examples=examples(10), deadline=None)
@given(data=st.data())
def test_prompts_fused_beside_each_other_are_those_fused_alone(
    index: Index, data: st.DataObject
) -> None:
    """Whatever slice comes next, and by twins, logits, KV and counts are the same to the bit."""
    engine = KVEngine(index, max_tokens=2, session_bytes=0, load_threads=1)
    numbers = st.tuples(st.sampled_from(PROMPTS), st.sampled_from(REPAIRS))
    asked = data.draw(st.lists(numbers, min_size=2, max_size=4))
    starts = [engine._start_now(*one) for one in asked]
    alone = [fused_of(whole(start.fuse(0.0, None))) for start in starts]
    twin = engine.index.model.twin(0) if data.draw(st.booleans()) else None
    works = {number: start.fuse(0.0, twin) for number, start in enumerate(starts)}
    left = data.draw(st.integers(-1, len(starts) - 1))  # whose client leaves
    together: dict[int, OpenAnswer] = {}
    begun: set[int] = set()
    while works:
        number = data.draw(st.sampled_from(sorted(works)))
        waits = data.draw(st.booleans())
        try:
            if number not in begun:
                begun.add(number)
                next(works[number])
            elif number == left:
                works.pop(number).close()
            else:
                works[number].send(waits)
        except StopIteration as done:
            together[number] = done.value
            del works[number]
    for number, answer in together.items():
        found, expected = fused_of(answer), alone[number]
        assert all(one.equal(other) for one, other in zip(found[0], expected[0], strict=True))
        assert found[1] == expected[1]
