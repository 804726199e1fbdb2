"""What an answering process tells Prometheus."""

import sys
from urllib.request import urlopen

import pytest

import kvrag
from kvrag.engine.engine import KVEngine
from kvrag.errors import ParameterError
from kvrag.ingest.index import Index
from kvrag_testing.bench_top import TEXTS

PROMPT = "Context:\n\n" + "\n\n".join(TEXTS) + "\n\nQuestion: who keeps it?\nAnswer:"


def ask(port: int) -> dict[str, float]:
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return {
        name: float(value)
        for name, _, value in (line.rpartition(" ") for line in lines if not line.startswith("#"))
    }


def test_a_process_tells_what_it_has_counted(index: Index) -> None:
    with kvrag.serve_metrics(index, port=0) as server:
        before = ask(server.port)
        report = KVEngine(index).fuse(PROMPT, policy="none").report
        after = ask(server.port)

        def risen(name: str) -> float:
            return after.get(name, 0.0) - before.get(name, 0.0)

        assert risen("kvrag_prompts_total") == 1
        assert risen('kvrag_chunks_total{outcome="loaded"}') == len(TEXTS)
        for kind in ("exact", "reused", "fresh"):
            expected = getattr(report, f"num_{kind}")
            assert risen(f'kvrag_tokens_total{{kind="{kind}"}}') == expected
        load = risen('kvrag_seconds_total{stage="load"}')
        assert load == pytest.approx(report.seconds["load"])
        name = index.store.counts()[0].name
        assert risen(f'kvrag_store_hits_total{{store="{name}",tier="0"}}') == len(TEXTS)
        assert risen(f'kvrag_store_read_bytes_total{{store="{name}",tier="0"}}') > 0
        assert risen(f'kvrag_store_seconds_total{{store="{name}",tier="0"}}') > 0
        with pytest.raises(ParameterError, match="choose another port"):
            kvrag.serve_metrics(index, port=server.port)
    with pytest.raises(OSError, match="refused"):
        ask(server.port)


def test_without_the_library(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ParameterError, match=r"kvrag\[metrics\]"):
        kvrag.serve_metrics(index)
