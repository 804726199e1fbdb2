"""The referee judges compressed chunks beside whole ones, on the same prompts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvrag.models.kv_model import KVModel
from kvrag_bench.quality.contest import run_quality_bench
from kvrag_bench.quality.entrants import QualityOptions
from kvrag_testing.bench_top import TEXTS
from tests.fusion.test_links import make_links
from tests.support.models import make_model, make_tokenizer


@pytest.fixture
def data(tmp_path: Path) -> str:
    path = tmp_path / "set.json"
    ctxs = [{"title": "", "text": text} for text in TEXTS]
    asked = [{"question": f"who keeps {i}?", "answers": ["Ines"], "ctxs": ctxs} for i in range(2)]
    path.write_text(json.dumps(asked))
    return str(path)


def test_compressed_chunks_are_judged_with_policy_none(data: str) -> None:
    model = KVModel(make_model(), make_tokenizer(), name="random")
    rows = run_quality_bench(
        QualityOptions(
            model=model,
            data=data,
            policies=("none", "deviation"),
            ratios=(1.0,),
            compressions=("none", "drop:0.5", "drop:0.75"),
            links=make_links(model),
            max_tokens=3,
            controls=False,
        )
    )
    assert [(row.policy, row.compression) for row in rows] == [
        ("none", "none"),
        ("none + links", "none"),
        ("deviation", "none"),
        ("deviation + links", "none"),
        ("none", "drop:0.5"),
        ("none + links", "drop:0.5"),
        ("none", "drop:0.75"),
        ("none + links", "drop:0.75"),
    ]
    bytes_per_token = {row.compression: row.bytes_per_token for row in rows}
    whole = bytes_per_token["none"]
    assert 0.45 < bytes_per_token["drop:0.5"] / whole < 0.65
    assert 0.2 < bytes_per_token["drop:0.75"] / whole < 0.45
    assert len({row.kl for row in rows}) == len(rows)
    assert rows[2].kl < 1e-6  # ratio 1.0: nothing of the stored chunks is left
