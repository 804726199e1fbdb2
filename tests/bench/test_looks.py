"""Policies that share a look come to what each comes to by itself."""

from typing import Any

import pytest
import torch

from kvrag.fusion import fuser
from kvrag.fusion.repair import make_repair
from kvrag.models.kv_model import KVModel
from kvrag_bench.judge.answers import Answerer
from kvrag_bench.judge.looks import Looks
from kvrag_testing.bench_top import Bench
from tests.support.models import make_model, make_tokenizer

SPECS = (
    "none",
    "query:ratio=0.2",
    "two_stage:ratio=0.2",
    "query:ratio=0.5:depth=0.5",
    "two_stage:ratio=0.6",  # all tokens are in its pool
    "two_stage:ratio=0.1:look=0.5:shift=1",
    "query:ratio=1.0",
    "deviation:ratio=0.3",
)


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(KVModel(make_model(num_hidden_layers=4), make_tokenizer()))


def test_one_look_serves_all(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    answerer = Answerer(bench.model, 4)
    layout = bench.lay_out(bench.prompt(2, 0, 3, 1))
    alone = [answerer.fuse(layout, bench.open_kv, make_repair(spec)).fused for spec in SPECS]
    looked = []
    ask = fuser.ask

    def note(*given: Any) -> Any:
        looked.append(given)
        return ask(*given)

    monkeypatch.setattr(fuser, "ask", note)
    looks = Looks(bench.model.spec.num_layers)
    for spec, expected in zip(SPECS, alone, strict=True):
        prompt = answerer.fuse(layout, bench.open_kv, make_repair(spec), looks=looks)
        fused = prompt.fused
        assert all(map(torch.equal, fused.picks, expected.picks))
        torch.testing.assert_close(fused.logits, expected.logits)
        report, wanted = fused.report, expected.report
        assert (report.policy, report.rows_asked) == (wanted.policy, wanted.rows_asked)
        assert report.work_share == wanted.work_share
        assert report.bytes_loaded == wanted.bytes_loaded
        # What another's look took counts as its own.
        assert ("ask" in report.seconds) == ("ask" in wanted.seconds)
        assert prompt.seconds >= report.seconds.get("ask", 0.0)
    assert len(looked) == 3  # two looks end early, and leave more than what they have seen
