"""Never slower: by stated prices, prompts are computed as a whole where that is faster."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvrag.engine import prices
from kvrag.engine.engine import KVEngine
from kvrag.engine.prices import SWITCH, Prices, measure
from kvrag.errors import ParameterError
from kvrag.fusion.fuser import OUTPRICED
from kvrag.fusion.layout import ReusedSpan
from kvrag.fusion.policies.base import NonePolicy, PromptRows
from kvrag.fusion.policies.two_stage import TwoStagePolicy
from kvrag.fusion.pricing import Pricing, RowPrices
from kvrag.ingest.index import Index
from kvrag.loading import threads
from kvrag.loading.pace import Pace
from kvrag.models.kv_model import KVModel
from kvrag_testing.bench_top import TEXTS, relative_difference
from tests.support.instructions import torch_threads

PROMPT = "Context:\n\n" + "\n\n".join(TEXTS) + "\n\nQuestion: who keeps it?\nAnswer:"
BY_ROW = RowPrices((1, 1000), (0.001, 1.0))
BY_LAUNCH = RowPrices((16, 4096), (1.0, 1.0))
"""As a small model on a card: whatever the rows, a pass takes as long as starting its kernels."""
SPANS = PromptRows(1100, 10, (ReusedSpan("a", 50, 0, 1000),))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(SWITCH)
    monkeypatch.setattr(prices, "_known", {})
    monkeypatch.setattr(prices, "_begun", set())


def _state(monkeypatch: pytest.MonkeyPatch, stated: RowPrices) -> None:
    monkeypatch.setattr(Prices, "known", lambda *_: stated)


def test_reuse_is_priced_by_its_rows_and_its_look() -> None:
    none = BY_ROW.of_reuse(NonePolicy(), SPANS, 100)
    assert none == pytest.approx(0.1)
    two_stage = BY_ROW.of_reuse(TwoStagePolicy(ratio=0.15), SPANS, 100)
    assert 0.1 + 0.1 + 0.15 <= two_stage < 0.6  # the look, the question, and the chosen rows
    exact_alone = PromptRows(1100, 10, ())
    assert BY_ROW.of_reuse(TwoStagePolicy(), exact_alone, 100) == pytest.approx(0.1)
    assert BY_LAUNCH.of_reuse(TwoStagePolicy(), SPANS, 100) == pytest.approx(2.0)


def test_a_slow_store_is_tried_again() -> None:
    waited = Pace()
    pricing = Pricing(BY_ROW, waited)
    assert not pricing.takes_full(NonePolicy(), SPANS, 100, 0)
    for _ in range(3):
        waited.observe(1000, 5.0)
    taken = [pricing.takes_full(NonePolicy(), SPANS, 100, 0) for _ in range(4)]
    assert taken == [True, True, True, False]


def test_where_full_prefill_is_faster_it_is_computed(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    _state(monkeypatch, BY_LAUNCH)
    before = index.counters.counts()
    engine = KVEngine(index, max_tokens=2)
    answer = engine.generate(PROMPT, explain=True)
    report = answer.report
    assert report.num_reused == report.num_exact == report.num_recomputed == report.num_chunks == 0
    assert report.bytes_loaded == 0
    assert report.num_fresh == report.num_tokens
    assert set(report.rows_by_layer) == {report.num_tokens}
    assert report.fresh_reasons[OUTPRICED] == report.num_outpriced > 0
    assert sum(report.fresh_reasons.values()) == report.num_fresh
    assert f"{report.num_outpriced} stored, but full prefill is faster" in report.one_line()
    told = sum(part.end - part.start for part in answer.parts if part.why == OUTPRICED)
    assert told == report.num_outpriced
    assert not report.misses
    counts = index.counters.counts()
    assert counts["full_prefills", ()] - before.get(("full_prefills", ()), 0) == 1
    whole = KVEngine(index, session_bytes=0).fuse(PROMPT, reuse=False)
    same = KVEngine(index, session_bytes=0).fuse(PROMPT)
    assert same.report.num_outpriced == report.num_outpriced
    assert relative_difference(same.logits, whole.logits) == 0.0
    # The next turn takes all of it.
    text = f"{PROMPT}{answer.text} Who else?"
    assert engine.generate(text).report.num_kept >= report.num_tokens


@pytest.mark.parametrize("policy", ["none", "two_stage"])
def test_where_reuse_is_faster_it_is_taken(
    index: Index, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    _state(monkeypatch, BY_ROW)
    report = KVEngine(index, session_bytes=0).fuse(PROMPT, policy=policy).report
    assert report.num_outpriced == 0
    assert report.num_reused > 0


def test_off_takes_what_is_stored(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    _state(monkeypatch, BY_LAUNCH)
    engine = KVEngine(index, session_bytes=0, never_slower=False)
    assert engine.fuse(PROMPT, policy="none").report.num_reused > 0
    with pytest.raises(ParameterError, match="never_slower"):
        KVEngine(index, never_slower="no")  # type: ignore[arg-type]


def test_a_deadline_decides_by_itself(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    _state(monkeypatch, BY_LAUNCH)
    report = KVEngine(index, session_bytes=0).fuse(PROMPT, policy="none", ttft=100.0).report
    assert report.num_outpriced == 0
    assert report.stream is not None


def test_the_first_prompt_measures_for_all_processes(
    index: Index, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It takes what is stored itself: nothing is measured before its first token."""
    asked = Prices(index.config.model_fingerprint)
    assert asked.known(index.model) is None
    with monkeypatch.context() as context:
        context.setattr(prices, "measure", lambda _: BY_LAUNCH)
        work: list[Callable[[], object]] = []
        context.setattr(prices.threads, "start", lambda what, _: work.append(what))
        engine = KVEngine(index, session_bytes=0, load_threads=0)
        for _ in range(2):
            assert engine.fuse(PROMPT, policy="none").report.num_outpriced == 0
        (one,) = work
        one()
    assert engine.fuse(PROMPT, policy="none").report.num_outpriced > 0
    (path,) = tmp_path.rglob("*.json")
    prices._known.clear()  # as in another process
    assert Prices(index.config.model_fingerprint).known(index.model) == BY_LAUNCH
    assert Prices("another").known(index.model) is None
    monkeypatch.setenv(SWITCH, "off")
    assert asked.known(index.model) is None
    monkeypatch.delenv(SWITCH)
    whole = path.read_text()
    for damaged in ("", "[]", whole[:-3], whole.replace("4096", "0"), whole.replace("cpu", "gpu")):
        path.write_text(damaged)
        prices._known.clear()
        assert asked.known(index.model) is None


@pytest.mark.parametrize("run", ["_layers_seconds", "_seconds"])
def test_what_is_measured_is_a_price_list(
    model: KVModel, monkeypatch: pytest.MonkeyPatch, run: str
) -> None:
    """The way of the CPU and that of a card, both on the CPU."""
    monkeypatch.setattr(prices, "_layers_seconds", getattr(prices, run))
    found = measure(model)
    assert found.num_rows[0] == 16
    assert found.num_rows[-1] < model.max_positions
    assert list(found.seconds) == sorted(found.seconds)


def test_without_a_cache_the_prices_last_as_long_as_the_process(
    index: Index, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def lasts() -> None:
        prices._forget()  # as in a forked process
        asked = Prices(index.config.model_fingerprint)
        assert asked.known(index.model) is None
        assert asked.measure(index.model) == asked.known(index.model)

    monkeypatch.setattr(prices, "measure", lambda _: BY_LAUNCH)
    lasts()
    (path,) = tmp_path.rglob("*.json")
    path.unlink()
    path.mkdir()
    lasts()
    assert [*path.parent.iterdir()] == [path]
    path.rmdir()
    path.parent.rmdir()
    path.parent.write_text("in the way")
    lasts()
    # As ~ is for a user whom the system does not know.
    monkeypatch.setenv("XDG_CACHE_HOME", "~nobody-has-this-name/cache")
    lasts()


def test_a_share_of_the_cores_has_the_prices_of_all(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt beside others is decided as alone."""
    monkeypatch.delenv(SWITCH, raising=False)
    asked = Prices("a fingerprint")
    with torch_threads(2):
        monkeypatch.setitem(prices._known, prices._key(index.model, "a fingerprint"), BY_LAUNCH)
        with threads.computing_with(2):
            assert torch.get_num_threads() == 1
            assert asked.known(index.model) is BY_LAUNCH
