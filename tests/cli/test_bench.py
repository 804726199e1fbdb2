from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import pytest

from kvrag.fusion.policies import DEFAULT_POLICY
from tests.cli.conftest import Run


@dataclass(frozen=True)
class FakeRow:
    model: str = "random"
    policy: str = "deviation"
    ratio: float | None = 0.15
    num_chunks: int = 10
    chunk_tokens: int = 500
    context_tokens: int = 5000
    plain_ttft_seconds: float = 9.0
    ttft_seconds: float = 1.8
    speedup: float = 5.0
    floor_seconds: float = 1.5
    floor_ratio: float = 1.2
    peak_bytes: int = 3 * 2**30
    kv_bytes: int = 2**30
    select_share: float = 0.02
    work_ratio: float = 1.08
    prefill_speedup: float = 1.6
    prefill_rate: float = 0.7
    context: str = "filler:512"
    compute: str = "float32"
    outpriced_tokens: int = 0


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Stand in for the measurement; return the list that receives its options."""
    received: list[Any] = []
    import kvrag_bench.ttft as ttft

    def measure(options: Any, on_progress: Any) -> Iterator[FakeRow]:
        received.append(options)
        on_progress("measuring")
        yield FakeRow()
        yield FakeRow(policy="none", ratio=None)

    monkeypatch.setattr(ttft, "run_ttft_bench", measure)
    return received


def test_json_is_a_list_of_rows(run: Run, asked: list[Any]) -> None:
    done = run("bench", "ttft", "--json")
    assert done.code == 0, done.err
    assert set(done.json[0]) == {field.name for field in fields(FakeRow)}
    assert asked[0].chunk_tokens == (100, 250, 500)
    assert asked[0].policies == ("none", DEFAULT_POLICY)


def test_table_for_a_person(run: Run, asked: list[Any]) -> None:
    done = run("bench", "ttft", "--chunk-tokens", "7, 9", "--policies", "none")
    assert done.code == 0, done.err
    assert "deviation 15%" in done.out
    assert "5.0x" in done.out
    assert "filler:512" in done.out
    assert asked[0].contexts == (None,)
    assert asked[0].chunk_tokens == (7, 9)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--chunk-tokens", "many"),
        ("--chunk-tokens", "0"),
        ("--chunk-tokens", ""),
        ("--policies", " ,"),
    ],
)
def test_bad_lists_are_named(run: Run, asked: list[Any], arguments: tuple[str, str]) -> None:
    done = run("bench", "ttft", *arguments)
    assert done.code == 1
    assert arguments[0] in done.err
    assert asked == []
