"""The oracles as a command, and both real models held against Transformers."""

from pathlib import Path
from typing import Any

import pytest

from kvrag_bench.exact import FLOAT32_BOUND, ExactOptions, ExactRow, run_exact_bench
from tests.support.models import needs_named_model

HANDBOOK = Path(__file__).parents[2] / "examples" / "handbook"
SMALL: dict[str, Any] = {"model": "kvrag-tiny", "data": HANDBOOK, "answer_tokens": 4}


def by_way(rows: list[ExactRow]) -> dict[str, ExactRow]:
    return {row.way: row for row in rows}


def test_equal_where_it_must_be_and_not_elsewhere() -> None:
    options = ExactOptions(**SMALL, num_tokens=(700,), dtypes=("float32",))
    rows = by_way(list(run_exact_bench(options)))
    for way in ("deviation, ratio 1.0", "two_stage, ratio 1.0", "encoded after the same text"):
        assert rows[way].bound == FLOAT32_BOUND
        assert rows[way].is_right
        assert rows[way].num_reused == 0
        assert rows[way].num_answer == 4
    assert rows["two_stage, ratio 1.0"].num_recomputed > 500
    assert rows["encoded after the same text"].num_exact > 500
    assert rows["Transformers, blocks of 256"].by_deviation < FLOAT32_BOUND
    # The others could not fail if plain reuse were exact as well.
    plain_reuse = rows["nothing recomputed"]
    assert plain_reuse.bound is None
    assert plain_reuse.by_deviation > 0.01
    assert plain_reuse.num_reused > 500


def test_bfloat16_stands_beside_its_noise() -> None:
    options = ExactOptions(**SMALL, num_tokens=(300,), policies=("boundary",))
    rows = [row for row in run_exact_bench(options) if row.dtype == "bfloat16"]
    assert (rows[0].way, rows[0].reference) == ("Transformers", "Transformers, float32")
    assert 1e-3 < rows[0].by_deviation < 1
    assert all(row.bound is None for row in rows)
    assert by_way(rows)["boundary, ratio 1.0"].by_deviation < 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_tokens"),
    [
        pytest.param("smollm2-135m", (500,), marks=needs_named_model("smollm2-135m")),
        # Within its window of 512 tokens, and past it.
        pytest.param("gemma-3-270m", (500, 1200), marks=needs_named_model("gemma-3-270m")),
    ],
)
def test_real_weights(name: str, num_tokens: tuple[int, ...]) -> None:
    options = ExactOptions(
        model=name, data=HANDBOOK, num_tokens=num_tokens, dtypes=("float32",), answer_tokens=16
    )
    rows = list(run_exact_bench(options))
    assert [row.way for row in rows if not row.is_right] == []
    assert any(row.num_exact > 300 for row in rows)
