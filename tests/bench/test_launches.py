"""Counting what a prompt starts on a graphics card, on a pretended one."""

from __future__ import annotations

import gc
import json
import sys
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import kvrag
from kvrag.cli.main import app
from kvrag.engine import prices, prompt_reader
from kvrag.engine.engine import KVEngine
from kvrag.engine.request import Request
from kvrag.errors import PromptTooLongError
from kvrag.fusion.pricing import RowPrices
from kvrag.fusion.slices import StoppedError
from kvrag.fusion.staging import GROUP_LAYERS, EarlyRecords
from kvrag.models.rowgraphs import RowGraphs, groups_of
from kvrag_bench import shapes
from kvrag_bench.card import CARD, CardTensor, pretended_card, to_card
from kvrag_bench.launches import count_launches, narrow_model
from kvrag_bench.setting import MEMORIES, temporary_index
from kvrag_testing.bench_top import TEXTS
from tests.models.test_compiled import model_of
from tests.support.properties import few, in_turn
from tests.support.rag import text_index
from tests.support.waiting import wait_until

_STREAMS = ("transform:2", "cachegen")
PROMPT = "\n\n".join(TEXTS) + "\n\nWho keeps the ledger?"


def test_operations_copies_and_waits_are_counted() -> None:
    with pretended_card() as counts:
        numbers = torch.arange(6, device=CARD)
        brought = torch.tensor([2, 3]).to(CARD)
        assert isinstance(numbers, CardTensor)
        assert numbers.device == CARD
        view = numbers.view(2, 3)[1:]
        assert (view + 1).tolist() == [[4, 5, 6]]
        numbers[brought] = 0
        assert int(numbers.sum()) == 10
        counts.settle("test")
        assert counts.launches == {"test": 4}  # arange, add, write, sum
        assert counts.copies == {"test": 1}
        assert counts.waits == {"test": 2}
        assert torch.arange(3).device.type == "cpu"


def test_the_hosts_own_time_is_counted_and_a_dispatch_for_each_start() -> None:
    with pretended_card() as counts:
        numbers = torch.zeros(1 << 20, device=CARD)
        counts.clear()
        before = time.thread_time()
        (numbers + 1).mul_(2)
        torch.ones(1 << 22).sum()  # in the host's memory
        whole = time.thread_time() - before
    assert counts.started == 2
    assert 0 < counts.host_seconds < 1e-4
    # The sum over the card's numbers is left out, that over the host's is not.
    assert 0 < counts.seconds < whole


@pytest.mark.parametrize(
    ("policy", "is_streamed"), in_turn(["none", "two_stage", "boundary", "deviation", "query"])
)
def test_branches_for_a_card_fuse_as_the_cpu_does(
    policy: str, is_streamed: bool, tmp_path: Path
) -> None:
    model, codec = model_of("qwen2"), "stream" if is_streamed else "raw"
    with text_index(tmp_path / "index", model, codec=codec) as index:
        engine = KVEngine(index, session_bytes=0)
        engine.fuse(PROMPT, policy=policy)  # makes the first chunk's record for its place
        expected = engine.fuse(PROMPT, policy=policy)
        with pretended_card() as counts:
            to_card(model.hf, counts)
            here = KVEngine(index, session_bytes=0)
            # By operations, then by graphs that were captured after it.
            runs = [here.fuse(PROMPT, policy=policy) for _ in range(3)]
    num_chunks = expected.report.num_chunks
    for found, num_hot in zip(runs, (0, num_chunks, num_chunks), strict=True):
        assert found.report.rows_by_layer == expected.report.rows_by_layer
        assert [len(one) for one in found.picks] == [len(one) for one in expected.picks]
        assert isinstance(found.logits, CardTensor)
        torch.testing.assert_close(found.logits.held, expected.logits, rtol=0, atol=1e-4)
        assert found.report.hot_chunks == {"card": num_hot, "pinned": 0}
    counted = index.counters.counts()["hot_bytes", (("memory", "card"),)]
    assert counted == sum(run.report.hot_bytes["card"] for run in runs[1:]) > 0
    counts.settle("test")
    assert counts.names["test", "graph"] > 0


def test_prices_are_those_of_captured_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("qwen2")
    monkeypatch.setattr(prices, "_NUM_ROWS", (16, 40))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "card")
    with pretended_card() as counts:
        to_card(model.hf, counts)
        prices.measure(model)
        counts.settle("test")
        on = prices._key(model, "")
        monkeypatch.setenv("KVRAG_CUDA_GRAPHS", "off")
        assert prices._key(model, "") != on
    num_groups = len(groups_of(model.spec.num_layers))
    assert counts.names["test", "graph"] == 2 * prices._REPEATS * num_groups


def test_records_are_opened_before_the_prompt_is_tokenised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of("qwen2")
    begun: list[int] = []
    earlies: list[EarlyRecords] = []
    tokenise = prompt_reader.tokenise_prompt

    def tokenising(*given: Any) -> Any:
        begun.append(len(earlies[-1]._threads))
        return tokenise(*given)

    with text_index(tmp_path / "index", model) as index:
        KVEngine(index, session_bytes=0).fuse(PROMPT)  # makes the first chunk's record
        with pretended_card() as counts:
            to_card(model.hf, counts)
            engine = KVEngine(index, session_bytes=0, max_tokens=1)
            engine.fuse(PROMPT, policy="none", is_wanted=lambda: True)
            early = engine._fuser.early

            def beginning(request: Request) -> EarlyRecords:
                made = early(request)
                assert made is not None
                earlies.append(made)
                return made

            monkeypatch.setattr(engine._fuser, "early", beginning)
            monkeypatch.setattr(prompt_reader, "tokenise_prompt", tokenising)
            again = engine.fuse(PROMPT, policy="none")
            with pytest.raises(PromptTooLongError):
                engine.fuse(PROMPT + " word" * 9_000)
            with pytest.raises(StoppedError):
                engine.fuse(PROMPT, is_wanted=iter([True, True, False]).__next__)
            never_begun = engine.stream(PROMPT)
            del never_begun
            tiers = engine._fuser._hot._made
            card = tiers[0]
            assert len(earlies) == len(begun) == 4
            left = [weakref.ref(one) for one in earlies]
            del earlies[:]
            # A thread that still copies holds what it copies for.
            wait_until(lambda: gc.collect() < 0 or not any(one() for one in left))
    assert min(begun) > 0
    assert again.report.hot_chunks["card"] == again.report.num_chunks
    assert card.size_bytes > 0
    assert not any(one._num_holders for one in card._kept.values())


@pytest.mark.parametrize("is_full", [True, False])
def test_nothing_is_copied_early_for_a_prompt_that_is_computed_as_a_whole(
    is_full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of("qwen2")
    with text_index(tmp_path / "index", model) as index:
        KVEngine(index, session_bytes=0).fuse(PROMPT)  # makes the first chunk's record
        with pretended_card() as counts:
            to_card(model.hf, counts)
            engine = KVEngine(index, session_bytes=0)
            engine.fuse(PROMPT, policy="none")
            prices = RowPrices((10, 1000), (1.0, 1.0 + 1e-6) if is_full else (1.0, 99.0))
            monkeypatch.setattr(engine._fuser, "_row_prices", lambda: prices)
            made: list[EarlyRecords] = []
            begin = EarlyRecords.begin

            def beginning(self: EarlyRecords, *given: Any) -> None:
                begin(self, *given)
                made.append(self)

            monkeypatch.setattr(EarlyRecords, "begin", beginning)
            report = engine.fuse(PROMPT, policy="none").report
            (early,) = made
    assert bool(report.num_outpriced) is is_full
    assert bool(early._threads) is not is_full


@pytest.mark.parametrize(("policy", "most_waits"), few(1, [("two_stage", 1), ("none", 0)]))
def test_a_prompt_waits_for_the_card_as_often_for_many_layers_as_for_few(
    policy: str, most_waits: int
) -> None:
    rows = [
        count_launches(shape, policy, num_chunks=3, chunk_tokens=40, repeats=1)
        for shape in ("test", "100m")
    ]
    assert rows[0].num_layers < rows[1].num_layers
    assert rows[0].num_waits == rows[1].num_waits <= most_waits
    assert rows[0].launches["select"] == rows[1].launches["select"]


@pytest.mark.parametrize(
    ("policy", "graphs", "most"),
    few(1, [*(("two_stage", "", 4.7), ("none", "off", 13.2)), ("two_stage", "off", 28)]),
)
def test_a_prompt_takes_few_launches_a_layer(
    policy: str, graphs: str, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVRAG_CUDA_GRAPHS", graphs)
    # The first prompts are carried out by operations; what they lack is captured after them.
    repeats = 1 if graphs == "off" else 2
    row = count_launches("llama-3.1-8b", policy, num_chunks=3, chunk_tokens=60, repeats=repeats)
    assert row.launches_per_layer <= most
    assert row.num_waits <= 3


def test_what_the_host_does_grows_with_neither_tokens_nor_much_with_layers() -> None:
    """Counted as calls of kvrag's own functions: no time is needed for that."""
    few, long, deep = (
        _own_calls(shape, num_tokens)
        for shape, num_tokens in (("test", 40), ("test", 400), ("100m", 40))
    )
    assert abs(long - few) <= 20
    assert few < 1800
    layers = shapes.SHAPES["100m"]["num_hidden_layers"] - shapes.SHAPES["test"]["num_hidden_layers"]
    assert deep - few <= 40 * layers


def _own_calls(shape: str, num_tokens: int) -> int:
    """Return how often a prompt's thread calls functions of kvrag, once graphs are captured."""
    model = narrow_model(shape)
    texts = [shapes.random_text(model, num_tokens, seed=seed) for seed in range(3)]
    prompt = "\n\n".join([*texts, shapes.random_text(model, 30, seed=3)])
    own = str(Path(kvrag.__file__).parent)
    num_calls = 0

    with temporary_index(model, texts, num_tokens, codec="raw") as index:
        KVEngine(index, session_bytes=0).fuse(prompt, policy="none")  # makes the first place
        with pretended_card() as counts:

            def note(frame: Any, event: str, _: object) -> None:
                nonlocal num_calls
                is_own = event == "call" and frame.f_code.co_filename.startswith(own)
                num_calls += is_own and not counts._is_computing

            to_card(model.hf, counts)
            engine = KVEngine(index, session_bytes=0)
            for _ in range(3):
                engine.fuse(prompt, policy="none")
            sys.setprofile(note)
            try:
                engine.fuse(prompt, policy="none")
            finally:
                sys.setprofile(None)
    return num_calls


@pytest.mark.parametrize("kernels", few(1, ["on", "off"]))
def test_loading_takes_launches_by_groups_of_layers_not_by_chunks(
    kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVRAG_GPU_KERNELS", kernels)
    few, many, deep = (
        count_launches(shape, "none", num_chunks=chunks, chunk_tokens=40, repeats=1)
        for shape, chunks in (("test", 2), ("test", 6), ("100m", 2))
    )
    groups = [-(-row.num_layers // GROUP_LAYERS) for row in (few, deep)]
    assert groups[0] < groups[1]
    assert few.launches["load"] == many.launches["load"]
    more = deep.launches["load"] - few.launches["load"]
    assert 0 < more <= (1 if kernels == "on" else 24) * (groups[1] - groups[0])
    for row, chunks, num in ((few, 2, groups[0]), (many, 6, groups[0]), (deep, 2, groups[1])):
        assert row.copies["loader"] == chunks * num
        assert row.launches.get("loader", 0) == 0
        assert row.waits.get("loader", 0) == row.waits["load"] == 0


def test_chunks_in_memory_are_not_copied_or_not_read() -> None:
    cold, pinned, hot = (
        count_launches("100m", "none", num_chunks=3, chunk_tokens=40, repeats=2, memory=memory)
        for memory in MEMORIES
    )
    assert hot.copies.get("loader", 0) == 0
    assert hot.launches["load"] < pinned.launches["load"] == cold.launches["load"]
    assert pinned.copies["loader"] == cold.copies["loader"] > 0
    for row in (cold, pinned, hot):
        assert row.launches.get("loader", 0) == row.waits.get("loader", 0) == row.waits["load"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["packed", *_STREAMS])
def test_compressed_chunks_are_decoded_by_groups_of_layers_not_by_chunks(codec: str) -> None:
    few, many = (
        count_launches("100m", "none", num_chunks=n, chunk_tokens=400, repeats=1, codec=codec)
        for n in (3, 6)
    )
    raw = count_launches("100m", "none", num_chunks=3, chunk_tokens=400, repeats=1)
    assert few.num_waits == many.num_waits == raw.num_waits
    assert few.waits.get("loader", 0) == many.waits.get("loader", 0) == 0
    num_groups = few.copies["loader"] // 4  # one for each record, and one for the tables
    assert many.copies["loader"] == 7 * num_groups
    # Streams of three planes at most, escapes, the transform, tokens that are kept; once the flags.
    most = (2 if codec == "packed" else 6) * num_groups + 1
    assert few.launches["loader"] <= most
    assert many.launches["loader"] <= most
    assert few.launches["load"] == many.launches["load"] <= raw.launches["load"] + 2


def test_the_command() -> None:
    options = ["--shape", "test", "--policy", "none", "--chunks", "2", "--chunk-tokens", "30"]
    done = CliRunner().invoke(app, ["bench", "launches", *options, "--json"])
    assert done.exit_code == 0, done.output
    (row,) = json.loads(done.stdout)
    assert row["policy"] == "none"
    assert row["copies"]["loader"] > 0
    assert row["host_ms"] == pytest.approx(sum(row["host_ms_by_phase"].values()))
    assert {"layout", "load", "compute"} <= row["host_ms_by_phase"].keys()
    assert row["launches_per_layer"] == sum(row["launches"].values()) / row["num_layers"]
    assert CliRunner().invoke(app, ["bench", "launches", "--shape", "nothing"]).exit_code == 1


def test_prompts_that_wait_at_the_same_time_go_through_layers_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of different lengths and policies; a graph of several is captured after the first ones."""
    model, replayed = model_of("qwen2"), []
    run = RowGraphs.run

    def joined(graphs: RowGraphs, layers: range, *given: Any, **named: Any) -> bool:
        is_done = run(graphs, layers, *given, **named)
        if len(given[0]) > 1:
            replayed.append(len(given[0]) if is_done else 0)
        return is_done

    monkeypatch.setattr(RowGraphs, "run", joined)
    prompts = [
        Request(text, policy=policy, max_tokens=1, logprobs=5)
        for text, policy in (
            (PROMPT, "none"),
            (f"{TEXTS[1]}\n\nWhat is it?", "none"),
            (f"{PROMPT} Say it in one word.", "two_stage"),
            (f"{TEXTS[2]}\n\n{TEXTS[0]}\n\nWho?", "none"),
            (f"{TEXTS[2]}\n\n{TEXTS[0]}\n\nWho is it?", "boundary"),
            (f"{TEXTS[1]}\n\n{TEXTS[2]}\n\nHow?", "two_stage"),
        )
    ]
    with text_index(tmp_path / "index", model) as index:
        engine = KVEngine(index, session_bytes=0)
        engine.generate_batch(prompts)  # makes first places
        expected = [engine.generate(one) for one in prompts]
        with pretended_card() as counts:
            to_card(model.hf, counts)
            here = KVEngine(index, session_bytes=0)
            runs = [here.generate_batch(prompts) for _ in range(4)]
            assert max(replayed) >= 3
            del replayed[:]
            here.generate(prompts[0])
            assert not replayed  # nobody to meet
    for answers in runs:
        for one, other in zip(answers, expected, strict=True):
            assert one.text == other.text
            assert one.report.rows_by_layer == other.report.rows_by_layer
            for mine, theirs in zip(one.logprobs, other.logprobs, strict=True):
                assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-3)
