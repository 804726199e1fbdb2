from pathlib import Path

import pytest

from kvrag.errors import ParameterError, PromptTooLongError
from kvrag.models.kv_model import KVModel
from kvrag_bench.inspection.measure import Inspection, inspect_question
from kvrag_bench.inspection.picture import draw_inspection
from kvrag_bench.judge.questions import JudgedQuestion
from kvrag_testing.bench_top import TEXTS

ASKED = JudgedQuestion("here", "", "who keeps it?", ("Ines",), TEXTS)


@pytest.fixture(scope="module")
def found(model: KVModel) -> Inspection:
    return inspect_question(model, ASKED, ratio=0.25)


def test_deviation_is_where_reuse_can_differ(found: Inspection) -> None:
    num_tokens = len(found.tokens)
    assert len(found.spans) == len(TEXTS)
    for layers in (found.key_deviation, found.value_deviation):
        assert len(layers) == 4
        assert all(len(layer) == num_tokens for layer in layers)
        # Layer 0 sees no other token; the head of the template stands where it always does.
        assert max(layers[0]) < 1e-4
        assert max(layers[3][: found.spans[0][0]]) < 1e-4
        begin, end = found.spans[2]
        assert max(layers[1][begin:end]) > 1e-2


def test_picks_are_reused_tokens_and_spend_the_ratio(found: Inspection) -> None:
    # The first chunk is exact, so there is nothing to choose in it.
    spans = found.spans[1:]
    reused = {row for begin, end in spans for row in range(begin, end)}
    assert set(found.picked) == {"boundary", "deviation", "two_stage"}
    assert set(found.picked["deviation"]) <= reused
    assert len(found.picked["deviation"]) == -(-len(reused) // 4)
    assert {begin for begin, _ in spans} <= set(found.picked["boundary"])


def test_pictures(found: Inspection, tmp_path: Path) -> None:
    paths = draw_inspection(found, tmp_path / "new")
    assert [path.name for path in paths] == ["deviation.png", "attention.png", "layers.png"]
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in paths)


def test_what_cannot_be_inspected(model: KVModel) -> None:
    one = JudgedQuestion("here", "", "who?", ("Ines",), TEXTS[:1])
    with pytest.raises(ParameterError, match="one chunk alone is exact"):
        inspect_question(model, one)
    long = JudgedQuestion("here", "", "who?", ("Ines",), ("The clock is tall. " * 900,))
    with pytest.raises(PromptTooLongError, match="here: the prompt has"):
        inspect_question(model, long)
