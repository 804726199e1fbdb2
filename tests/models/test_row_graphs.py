"""Layers over rows, captured as graphs: by an executor that notes operations with their buffers."""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import transformers.generation.continuous_batching  # noqa: F401  # before there are other streams
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrag.kvcache import FusedKV
from kvrag.models import cardlayers, rowgraphs
from kvrag.models.attention import MassObserver, num_before, rows_on
from kvrag.models.batched_prefill import Meeting, share_of
from kvrag.models.cardlayers import RowsAsked, Slots
from kvrag.models.compiled import describe_layers
from kvrag.models.kv_model import KVModel
from kvrag.models.rowgraphs import BUCKETS, CapturedLayers, RowGraphs, groups_of
from kvrag.models.rows import Attending, RowPass
from kvrag.native.gpu import rows as row_kernels
from kvrag.native.gpu import tiled
from kvrag.native.gpu.rows import RowTensors
from kvrag_bench.card import RecordedGraph, StateOperations, recorded
from tests.models.test_compiled import model_of
from tests.support.properties import examples

FAMILIES = ["llama", "qwen3", "gemma2", "gemma3", "mistral-sliding"]
CPU = torch.device("cpu")


class Stream:
    """A stream whose work is done."""

    def wait_stream(self, other: Stream) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


@pytest.fixture(autouse=True)
def executor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capture on the CPU."""
    monkeypatch.setattr(rowgraphs, "Graph", RecordedGraph)
    monkeypatch.setattr(rowgraphs, "_failures", [])
    monkeypatch.setattr(cardlayers, "kernels_over", StateOperations)
    monkeypatch.setattr(cardlayers, "operations_for", lambda places, _: RowTensors(places))
    monkeypatch.setattr(tiled, "_trusted", {})
    for name in ("Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, **__: Stream())
    monkeypatch.setattr(torch.cuda, "stream", lambda one: one)


def graphs_of(model: KVModel) -> tuple[CapturedLayers, RowGraphs]:
    described = describe_layers(model.rows.layers, model.windows, model._any_tables())
    slots = Slots(described, CPU)
    graphs = RowGraphs(described, slots, CPU, model.lock)
    return CapturedLayers(described, slots, graphs), graphs


class Prompt:
    """Rows of a prompt, and its buffer, in which all that is no row of it is NaN."""

    def __init__(self, model: KVModel, num_tokens: int, num_rows: int, seed: int) -> None:
        made = torch.Generator().manual_seed(seed)
        self.model, self.num_tokens = model, num_tokens
        self.fused = FusedKV(model.spec, num_tokens, num_tokens + seed % 5)
        self.fused.storage.normal_(generator=made)
        for kv in (*self.fused.keys, *self.fused.values):
            kv[:, :, num_tokens:] = torch.nan
        others = torch.randperm(num_tokens - 1, generator=made)[: num_rows - 1]
        rows = torch.cat([others, torch.tensor([num_tokens - 1])]).sort().values
        self.rows = rows_on(CPU, rows)
        first = seed % 7
        self.tables = model.tables(num_tokens, range(first, first + num_tokens))
        self.hidden = torch.randn(num_rows, model.hf.config.hidden_size, generator=made)
        self.mass = torch.zeros(model.spec.num_layers, num_tokens)
        self.question = num_tokens // 2

    def assert_like(self, other: Prompt, *, looks: bool) -> None:
        for one, expected in (
            (self.hidden, other.hidden),
            (self.fused.storage, other.fused.storage),
            (self.mass, other.mass),
        ):
            torch.testing.assert_close(one, expected, rtol=1e-4, atol=1e-4, equal_nan=True)
        assert bool(self.mass.any()) is looks

    def asked(self) -> RowsAsked:
        return RowsAsked(self.mass, 0, num_before(self.rows, self.question))

    def run(self, compiled: CapturedLayers, *, looks: bool, together: bool) -> int:
        """Compute all layers but the last; return how many of them were replayed."""
        num_layers, done, replayed = self.model.spec.num_layers - 1, 0, 0
        observer = MassObserver(self.question, lambda *_: None, (self.mass, 0))
        attending = Attending(observer if looks else None)
        while done < num_layers:
            found = range(0)
            if together:
                observed = range(num_layers) if looks else range(0)
                found = compiled.together(done, self.rows, observed)
            given = self.rows, self.fused, self.tables
            with self.model.computing_rows():
                if found:
                    asked = self.asked() if looks else None
                    compiled.run_together(found, self.hidden, *given, asked)
                    replayed += 1
                else:
                    of = RowPass(*given, compiled)
                    self.model.rows.forward(done, self.hidden, of, attending=attending)
            done = max(found.stop, done + 1)
        return replayed


@cache
def deep(family: str) -> KVModel:
    return model_of(family)


def captured_for(model: KVModel, *sizes: int) -> tuple[CapturedLayers, RowGraphs]:
    """Return layers that are captured for the buckets of some numbers of rows."""
    compiled, graphs = graphs_of(model)
    for size in sizes:
        for looks in (False, True):
            graphs.find(0, size, looks=looks)
    graphs.capture()
    assert not graphs.wants_more
    return compiled, graphs


def test_groups_end_where_a_policy_chooses_and_before_the_last_layer() -> None:
    assert groups_of(32) == [range(1), range(1, 8), range(8, 16), range(16, 24), range(24, 31)]
    assert groups_of(9) == [range(1), range(1, 8)]
    assert groups_of(2) == [range(1)]
    assert groups_of(1) == []
    assert BUCKETS[:5] == (32, 48, 64, 96, 128)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=examples(30), deadline=None)
@given(data=st.data())
def test_a_bucket_computes_what_its_rows_alone_do(family: str, data: Any) -> None:
    model = deep(family)
    compiled, graphs = layers_of(family)
    for slot in graphs._slots.of(48).values():
        slot.fill_(torch.nan)
    graphs._positions.fill_(1 << 40)
    for seed in data.draw(st.lists(st.integers(0, 99), min_size=1, max_size=3)):
        num_tokens = data.draw(st.integers(3, 60))
        num_rows = data.draw(st.integers(1, min(num_tokens, 48)))
        looks = data.draw(st.booleans())
        ours, theirs = (Prompt(model, num_tokens, num_rows, seed) for _ in range(2))
        num_groups = len(groups_of(model.spec.num_layers))
        assert ours.run(compiled, looks=looks, together=True) == num_groups
        assert theirs.run(compiled, looks=looks, together=False) == 0
        ours.assert_like(theirs, looks=looks)


@cache
def layers_of(family: str) -> tuple[CapturedLayers, RowGraphs]:
    return captured_for(deep(family), 32, 48)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=examples(10), deadline=None)
@given(data=st.data())
def test_several_prompts_in_one_graph_are_each_alone(family: str, data: Any) -> None:
    model = deep(family)
    compiled, graphs = layers_of(family)
    meeting, looks = Meeting(), data.draw(st.booleans())
    for slot in graphs._slots.of(256).values():
        slot.fill_(torch.nan)
    graphs._positions.fill_(1 << 40)
    sizes = st.integers(2, 60).flatmap(
        lambda tokens: st.tuples(st.just(tokens), st.integers(1, min(tokens, 32)))
    )
    for _ in range(2):
        chosen = data.draw(st.lists(sizes, min_size=2, max_size=5))
        ours, theirs = (
            [Prompt(model, *size, seed) for seed, size in enumerate(chosen)] for _ in range(2)
        )
        layers = [CapturedLayers(compiled.description, compiled._slots, graphs) for _ in ours]
        for group in groups_of(model.spec.num_layers):
            shares = []
            for one, own in zip(ours, layers, strict=True):
                of = RowPass(one.rows, one.fused, one.tables, own)
                asked = one.asked() if looks else None
                with meeting.open():
                    given = model, group, one.hidden, of, asked
                    shares.append(share_of(*given, is_captured=True))
            offered = [one for one in shares if one is not None]
            going = meeting.compute(offered)
            if len(going) == 1:
                assert not going[0].is_done
                assert graphs.wants_more
                graphs.capture()
                going = meeting.compute(offered)
            assert going == shares
            assert all(one.is_done for one in offered)
        for one, other in zip(ours, theirs, strict=True):
            other.run(compiled, looks=looks, together=False)
            one.assert_like(other, looks=looks)


def test_where_memory_is_short_graphs_compute_fewer_prompts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = deep("llama")
    compiled, graphs = captured_for(model, 20)
    capture, before = rowgraphs.capture, set(graphs._graphs)
    assert (graphs.room_for(20), graphs.room_for(200), graphs.room_for(300)) == (8, 2, 1)

    def short(*given: Any) -> Any:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(rowgraphs, "capture", short)
    prompts = [Prompt(model, 40, 20 + n, n) for n in range(4)]
    given = [
        range(1),
        [one.hidden for one in prompts],
        [one.rows for one in prompts],
        [compiled.state_of(one.rows, one.fused, one.tables, None) for one in prompts],
    ]
    assert not graphs.run(*given, looks=False)
    graphs.capture()
    assert graphs.room_for(20) == 2
    monkeypatch.setattr(rowgraphs, "capture", capture)
    pair = given[0], *(one[:2] for one in given[1:])
    assert not graphs.run(*pair, looks=False)
    graphs.capture()
    with model.computing_rows():
        assert graphs.run(*pair, looks=False)
    assert before < graphs._graphs.keys()


def test_prompts_that_take_turns_have_their_own_rows() -> None:
    model = deep("llama")
    compiled, _ = captured_for(model, 32)
    prompts = [Prompt(model, 40, 20 + n, n) for n in range(2)]
    expected = [Prompt(model, 40, 20 + n, n) for n in range(2)]
    done = 0
    while done < model.spec.num_layers - 1:
        for one in prompts:
            group = compiled.together(done, one.rows)
            with model.computing_rows():
                compiled.run_together(group, one.hidden, one.rows, one.fused, one.tables)
        done = group.stop
    for one, other in zip(prompts, expected, strict=True):
        other.run(compiled, looks=False, together=False)
        one.assert_like(other, looks=False)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="no Triton")
def test_kernels_read_the_rows_from_their_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    start = row_kernels.start
    monkeypatch.setattr(
        row_kernels, "start", lambda *given, **named: recorded(partial(start, *given, **named))
    )
    monkeypatch.setattr(rowgraphs, "Graph", RecordedGraph)
    monkeypatch.setattr(tiled, "_trusted", {})
    monkeypatch.setattr(cardlayers, "_CHECKED_TOKENS", 50)
    monkeypatch.setattr(cardlayers, "_CHECKED_ROWS", 9)
    for name in ("Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, **__: Stream())
    monkeypatch.setattr(torch.cuda, "stream", lambda one: one)
    model = deep("qwen3")
    compiled, graphs = graphs_of(model)
    graphs.find(0, 9, looks=True)
    graphs.capture()
    assert tiled._trusted
    assert all(tiled._trusted.values())
    for seed in range(2):
        ours, theirs = (Prompt(model, 30 + seed, 9 + seed, seed) for _ in range(2))
        assert ours.run(compiled, looks=True, together=True) > 0
        theirs.run(compiled, looks=True, together=False)
        ours.assert_like(theirs, looks=True)


def test_a_prompt_captures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rowgraphs, "Graph", lambda *_: pytest.fail("a prompt captured"))
    model = deep("llama")
    compiled, graphs = graphs_of(model)
    for looks in (False, True):
        prompt = Prompt(model, 40, 20, 1)
        assert prompt.run(compiled, looks=looks, together=True) == 0
    assert graphs._wanted == {(32, False, 1), (32, True, 1)}


def test_graphs_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(rowgraphs.VARIABLE, "off")
    model = deep("llama")
    compiled, graphs = graphs_of(model)
    Prompt(model, 40, 20, 1).run(compiled, looks=False, together=True)
    assert not graphs.wants_more
    monkeypatch.delenv(rowgraphs.VARIABLE)
    compiled, graphs = captured_for(model, 20)
    monkeypatch.setenv(rowgraphs.VARIABLE, "0")
    assert Prompt(model, 40, 20, 1).run(compiled, looks=False, together=True) == 0


def test_a_capture_that_fails_is_told_once_and_leaves_prompts_as_they_were(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = deep("llama")
    made = 0

    class Failing(RecordedGraph):
        def __init__(self, run: Callable[[], Any], *more: object) -> None:
            nonlocal made
            made += 1
            if made == 4:
                raise RuntimeError("operation not permitted when stream is capturing\nlong story")
            super().__init__(run, *more)

    monkeypatch.setattr(rowgraphs, "Graph", Failing)
    compiled, graphs = graphs_of(model)
    for size in (20, 40, 60):
        graphs.find(0, size, looks=False)
    with caplog.at_level(logging.WARNING):
        graphs.capture()
        graphs.capture()
    assert made == 4
    (told,) = (record.getMessage() for record in caplog.records)
    assert "stream is capturing" in told
    assert "long story" not in told
    assert rowgraphs.VARIABLE in told
    ours, theirs = (Prompt(model, 70, 20, 1) for _ in range(2))
    assert ours.run(compiled, looks=False, together=True) == 0
    theirs.run(compiled, looks=False, together=False)
    assert torch.equal(ours.hidden, theirs.hidden)
    assert not graphs.wants_more


def test_a_replay_that_computes_something_else_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Forgetting(RecordedGraph):
        def replay(self) -> None:
            for call in self.calls[:-1]:
                call()

    monkeypatch.setattr(rowgraphs, "Graph", Forgetting)
    compiled, graphs = graphs_of(deep("llama"))
    graphs.find(0, 20, looks=False)
    graphs.capture()
    assert "off by" in caplog.text
    assert not graphs.wants_more
    prompt = Prompt(deep("llama"), 40, 20, 1)
    assert prompt.run(compiled, looks=False, together=True) == 0


@pytest.mark.parametrize("fits", [3000, 100])
def test_short_memory_makes_fewer_rows_at_once(fits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty

    def limited(*size: Any, **more: Any) -> torch.Tensor:
        if size and isinstance(size[0], int) and size[0] > fits:
            raise torch.OutOfMemoryError("no memory")
        return empty(*size, **more)

    model = deep("llama")
    prompt = Prompt(model, 40, 20, 1)
    monkeypatch.setattr(torch, "empty", limited)
    compiled, graphs = graphs_of(model)
    for size in (20, 200, 4000):
        graphs.find(0, size, looks=False)
    graphs.capture()
    most = 1 << int(math.log2(fits))
    assert graphs._slots.most_rows == most
    assert {bucket for _, bucket, *_ in graphs._graphs} == {32} | ({256} if fits > 256 else set())
    assert not graphs.find(0, most + 1, looks=False)
    assert not graphs.wants_more
    # More rows together would take other slots than those that graphs read.
    assert graphs.room_for(20) == (8 if fits > 256 else 2)
    assert prompt.run(compiled, looks=False, together=True) > 0


def test_slots_wait_for_their_last_user_on_another_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[tuple[str, str]] = []

    class Named(Stream):
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_stream(self, other: Any) -> None:
            if isinstance(other, Named):  # not the stream of captures
                waits.append((self.name, other.name))

    model, here = deep("llama"), Named("prompt")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: here)
    compiled, graphs = graphs_of(model)
    graphs._slots._device = torch.device("cuda")  # but its memory is the host's
    monkeypatch.setattr(torch, "empty", partial(_on_host, torch.empty))
    one, other = (Prompt(model, 40, 20, seed) for seed in (1, 2))
    one.run(compiled, looks=False, together=True)
    assert not waits
    here = Named("background")
    graphs._slots.reserve()  # which lets the prompt's memory go
    assert waits == [("background", "prompt")]
    graphs.capture()
    assert ("background", "prompt") in waits
    here = Named("another prompt")
    assert other.run(compiled, looks=False, together=True) > 0
    assert waits[-1] == ("another prompt", "background")
    here = Named("joined")
    shares = [(one.hidden, one.rows), (other.hidden, other.rows)]
    states = [compiled.state_of(each.rows, each.fused, each.tables, None) for each in (one, other)]
    group = compiled.together(0, one.rows)
    graphs.run(group, *zip(*shares, strict=True), states, looks=False)
    graphs.capture()
    here = Named("joined again")
    with torch.no_grad():
        assert graphs.run(group, *zip(*shares, strict=True), states, looks=False)
    assert waits[-1] == ("joined again", "joined")


def _on_host(empty: Any, *size: Any, **more: Any) -> torch.Tensor:
    return empty(*size, **more | {"device": CPU})


@pytest.mark.parametrize("after", [False, True])
def test_memory_that_ends_in_a_capture_leaves_smaller_buckets(
    after: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    short = torch.OutOfMemoryError("no memory")

    class Limited(RecordedGraph):
        def __init__(self, run: Any, *more: Any) -> None:
            super().__init__(run, *more)
            if self.calls and (128, 0) in graphs._each:
                try:
                    raise short
                except torch.OutOfMemoryError:
                    if after:  # the capture's end finds that it has failed
                        raise RuntimeError("operation failed due to a previous error") from None
                    raise

    monkeypatch.setattr(rowgraphs, "Graph", Limited)
    monkeypatch.setattr(rowgraphs, "BUCKETS", (32, 64, 128))
    _, graphs = graphs_of(deep("llama"))
    graphs.find(0, 120, looks=False)
    graphs.capture()
    assert not graphs._graphs
    del graphs._each[128, 0]
    for size in (120, 60, 20):
        graphs.find(0, size, looks=False)
    graphs.capture()
    assert {bucket for _, bucket, *_ in graphs._graphs} == {32, 64}
    assert rowgraphs.uses_graphs()
    (told,) = (record.getMessage() for record in caplog.records)
    assert "of rows at most 64 at once" in told


def test_memory_may_end_between_finding_layers_and_running_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled, graphs = graphs_of(deep("llama"))
    graphs.find(0, 20, looks=False)
    graphs.capture()
    before, after = (Prompt(deep("llama"), 40, 20, 1) for _ in range(2))
    found = compiled.together(0, after.rows)
    assert found

    def run(prompt: Prompt) -> torch.Tensor:
        with torch.no_grad():
            compiled.run_together(found, prompt.hidden, prompt.rows, prompt.fused, prompt.tables)
        return prompt.hidden

    expected = run(before)

    def short(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(rowgraphs, "Prepared", short)
    graphs.find(0, 20, looks=True)
    graphs.capture()
    assert not compiled.together(0, after.rows)
    assert torch.equal(run(after), expected)


def test_no_garbage_is_collected_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    class Noting(RecordedGraph):
        def __init__(self, *given: Any) -> None:
            seen.append(gc.isenabled())
            super().__init__(*given)

    monkeypatch.setattr(rowgraphs, "Graph", Noting)
    _, graphs = graphs_of(deep("llama"))
    graphs.find(0, 20, looks=False)
    graphs.capture()
    assert seen
    assert not any(seen)
    assert gc.isenabled()


def test_what_a_prompt_in_inference_mode_took_is_captured() -> None:
    compiled, graphs = graphs_of(deep("llama"))
    with torch.inference_mode():
        graphs._slots.of(cardlayers.MOST_ROWS)
        graphs.find(0, 20, looks=False)
    graphs.capture()
    assert rowgraphs.uses_graphs()
    assert Prompt(deep("llama"), 40, 20, 1).run(compiled, looks=False, together=True) > 0
