from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvrag_bench.codec.rows import BASELINE, CODER, CONTEXT, DESIGN, EQUAL, PRESET, CodecRow
from tests.cli.conftest import Run

ROWS = [
    CodecRow(PRESET, "kvrag-tiny", "transform", "1/2", 250, 1.23456, 12345.0, 1e-5, 0.1, 1.2),
    CodecRow(BASELINE, "kvrag-tiny", "cachegen-public-16", "x0.25", 250, 12.5, 1200.0, 0.5, 0.6),
    CodecRow(
        EQUAL, "kvrag-tiny", "transform", None, 250, 1.0, None, 0.005, baseline="8-bit", ratio=8
    ),
    CodecRow(DESIGN, "kvrag-tiny", "pca, all layers, K and V apart", None, 250, 1.0, 10.0, 0.02),
    CodecRow(CODER, "mix of transform:0.5", "constriction", "range", threads=1, ratio=31.25),
    CodecRow(
        CONTEXT, "random", "transform", "1", 5000, 1.0, group_layers=4, seconds=0.5, ratio=0.02
    ),
]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Stand in for the measurement; return the list that receives its options."""
    received: list[Any] = []
    import kvrag_bench.codec.run as bench

    def measure(options: Any, on_progress: Any) -> Iterator[CodecRow]:
        received.append(options)
        on_progress("measuring")
        yield from ROWS

    monkeypatch.setattr(bench, "run_codec_bench", measure)
    return received


def test_tables_for_a_person_fit_100_columns(run: Run, asked: list[Any]) -> None:
    done = run("bench", "codec", "--parts", "rate,speed", "--chunk-tokens", "7, 9")
    assert done.code == 0, done.err
    assert asked[0].chunk_tokens == (7, 9)
    for expected in ("transform:1/2", "8.00x", "31.25x", "transform:1, 4 layers", "2.00%"):
        assert expected in done.out
    assert max(len(line.rstrip()) for line in done.out.splitlines()) <= 100


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--parts", "weight"), "weight"),
        (("--parts", " ,"), "--parts"),
        (("--sources", "minilm"), "--data"),
        (("--sources", "minilm", "--data", "missing.json"), "missing.json"),
        (("--sources", "nothing", "--data", __file__), "nothing"),
        (("--model", "somewhere/else"), "--data"),
        (("--chunk-tokens", "0"), "--chunk-tokens"),
        (("--chunk-tokens", "many"), "--chunk-tokens"),
        (("--codecs", "zip"), "zip"),
        (("--group-layers", "-1"), "--group-layers"),
        (("--random-shape", "gpt-9"), "gpt-9"),
        (("--out", "curves.jpg"), "curves.jpg"),
        (("--out", "curves.png", "--parts", "speed"), "--out"),
    ],
)
def test_bad_input_is_named_before_any_work(
    run: Run, asked: list[Any], arguments: tuple[str, ...], named: str
) -> None:
    done = run("bench", "codec", *arguments)
    assert done.code == 1
    assert named in done.err
    assert asked == []
