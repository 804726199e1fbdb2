"""Options that measure nothing are one clear error each, before a model is loaded."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvrag.errors import KVRagError
from kvrag.models.kv_model import KVModel
from kvrag_bench.batch import BatchOptions, run_batch_bench
from kvrag_bench.decode import DecodeOptions, run_decode_bench
from kvrag_bench.exact import ExactOptions, run_exact_bench
from kvrag_bench.load.pipelining import PipeliningOptions
from kvrag_bench.peers.options import PeersOptions
from kvrag_bench.peers.run import run_peers_bench
from kvrag_bench.quality.contest import run_quality_bench
from kvrag_bench.quality.entrants import QualityOptions
from kvrag_bench.session import SessionOptions, run_session_bench
from kvrag_bench.stream.measure import StreamOptions
from kvrag_bench.ttft import TTFTOptions, run_ttft_bench
from kvrag_bench.vectors import VectorBenchOptions, run_vector_bench


def quality(**options: Any) -> object:
    return run_quality_bench(QualityOptions(**options))


def of(run: Callable[..., Any], kind: type[Any], **given: Any) -> Callable[..., object]:
    def measure(**options: Any) -> object:
        rows = run(kind(**given, **options))
        return list(rows) if isinstance(rows, Iterator) else rows

    return measure


exact = of(run_exact_bench, ExactOptions, model="test")
ttft = of(run_ttft_bench, TTFTOptions, shape="test")
decode = of(run_decode_bench, DecodeOptions, shape="test")
batch = of(run_batch_bench, BatchOptions, shape="test")
session = of(run_session_bench, SessionOptions, shape="test")
peers = of(run_peers_bench, PeersOptions)

Case = tuple[Callable[..., object], dict[str, Any], str]
CASES: list[Case] = [
    (PipeliningOptions, {"gigabytes_per_second": [0.0]}, "GB/s, one at least"),
    (PipeliningOptions, {"policy": "nonsense"}, "nonsense"),
    (StreamOptions, {"step_seconds": -1.0}, "bench stream"),
    (StreamOptions, {"time_scale": 0.0}, "bench stream"),
    (ttft, {"chunk_tokens": ()}, "must be 1 or more"),
    (ttft, {"num_chunks": 100, "chunk_tokens": (500,)}, "do not fit the 4096"),
    (decode, {"num_tokens": 0}, "bench decode"),
    (batch, {"num_chunks": 900}, "do not fit"),
    (session, {"num_turns": 1}, "bench session"),
    (peers, {"num_chunks": 10_000}, "ask for fewer"),
    (peers, {"model": "/no/such/model"}, "/no/such"),
    (run_vector_bench, {"options": VectorBenchOptions(1000, 16, 5)}, "expected more than"),
    (exact, {"num_tokens": (0,)}, "1 or more"),
    (exact, {"data": Path("absent.md"), "num_tokens": (100,)}, "cannot read"),
    (quality, {"policies": ("auto:ttft=1",)}, "it chooses among the others"),
    (quality, {"policies": ("query:ratio=0.5:ratio=0.1",)}, "gives ratio twice"),
    (quality, {"ratios": ()}, "choose policy .none."),
    (quality, {"max_tokens": 0}, "max_tokens 0"),
    (quality, {"num_questions": 0}, "0 questions"),
    (quality, {"num_documents": 9}, "cannot generate"),
    (quality, {"contexts": ("later",)}, "context 'later': expected one of"),
    (quality, {"contexts": ()}, "one context and one eviction"),
    (quality, {"suite": ("poems",)}, "no real set 'poems'"),
]


@pytest.mark.parametrize(("measure", "options", "message"), CASES)
def test_wrong_options(
    monkeypatch: pytest.MonkeyPatch,
    measure: Callable[..., object],
    options: dict[str, Any],
    message: str,
) -> None:
    def load(name: str, *_: Any, **__: Any) -> None:
        if name != "/no/such/model":
            pytest.fail("the model was loaded")

    if measure is quality:
        monkeypatch.setattr(KVModel, "load", load)
    with pytest.raises(KVRagError, match=message):
        measure(**options)
