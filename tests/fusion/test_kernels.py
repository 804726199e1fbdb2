"""Few rows of a prompt are computed by kernels alone, others by the model's modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch

from kvrag.fusion.fuser import FusedPrompt
from kvrag.fusion.repair import make_repair
from kvrag.models.compiled import CompiledLayers
from kvrag.models.kv_model import KVModel
from kvrag.models.rows import RowRunner
from kvrag.native.kernels import REFERENCE, instruction_set
from kvrag_testing.bench_top import Bench
from tests.support.models import make_model, make_tokenizer

pytestmark = [
    pytest.mark.skipif(instruction_set() == REFERENCE, reason="nothing is compiled"),
    pytest.mark.usefixtures("isa"),
]

ORDER = (2, 0)


@contextmanager
def counting() -> Iterator[dict[str, int]]:
    """Let kernels compute any number of rows, and count calls of layers by what computes them."""
    counts = {"kernels": 0, "modules": 0}
    run_rows, run = CompiledLayers.run_rows, RowRunner._run

    def by_kernels(*given: Any, **named: Any) -> None:
        counts["kernels"] += 1
        run_rows(*given, **named)

    def by_modules(*given: Any, **named: Any) -> Any:
        counts["modules"] += 1
        return run(*given, **named)

    with (
        patch.object(CompiledLayers, "can_run", return_value=True),
        patch.object(CompiledLayers, "run_rows", by_kernels),
        patch.object(RowRunner, "_run", by_modules),
    ):
        yield counts


def fused_by_modules(bench: Bench, policy: str) -> FusedPrompt:
    with patch.object(KVModel, "compile", return_value=None):
        return bench.fuse(bench.prompt(*ORDER), make_repair(policy, ratio=None))


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(KVModel(make_model("qwen3"), make_tokenizer()))


@pytest.mark.parametrize("policy", ["none", "boundary", "query", "two_stage", "gradual"])
def test_what_is_fused_is_what_modules_compute(bench: Bench, policy: str) -> None:
    with counting() as counts:
        found = bench.fuse(bench.prompt(*ORDER), make_repair(policy))
    assert counts["kernels"] > 0
    if policy != "gradual":  # which compares rows in each layer
        # Modules project the rows of a last layer and those among which is chosen, and end a look.
        assert counts["kernels"] >= bench.model.spec.num_layers
        assert counts["modules"] <= 4
    expected = fused_by_modules(bench, policy)
    assert (found.logits - expected.logits).abs().max() <= 1e-5 * expected.logits.std()
    assert all(
        torch.equal(one, other) for one, other in zip(found.picks, expected.picks, strict=True)
    )
