"""The whole path on a GPU, wherever one is: prompts, answers and records are those of the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvrag.chunk import Document
from kvrag.engine.engine import KVEngine
from kvrag.engine.request import Request
from kvrag.ingest.index import Index
from kvrag.models.kv_model import KVModel
from kvrag_testing.bench_top import TEXTS
from tests.support.rag import text_index

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
DEVICE = "cuda"
CODECS = ["packed", "raw", "lossless", "cachegen", "transform", "stream"]
POLICIES = ["none", "boundary", "deviation", "query", "random", "two_stage", "gradual"]
PROMPT = "\n\n".join(TEXTS) + "\n\nWho keeps the ledger?"


@pytest.fixture(scope="module", params=CODECS)
def indexes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Index, Index]]:
    """One index, opened on the CPU and on the GPU."""
    folder = tmp_path_factory.mktemp("gpu") / "index"
    documents = [Document(source=f"text-{i}", text=text) for i, text in enumerate(TEXTS)]
    with (
        Index.create(folder, model="kvrag-tiny", embedding="hashing", codec=request.param) as here,
    ):
        here.add(documents)
        with Index.open(folder, device=DEVICE) as there:
            assert there.model.device.type == torch.device(DEVICE).type
            yield here, there


@pytest.mark.parametrize("policy", POLICIES)
def test_a_fused_prompt(indexes: tuple[Index, Index], policy: str) -> None:
    expected, found = (KVEngine(index).fuse(PROMPT, policy=policy) for index in indexes)
    assert found.report.rows_by_layer == expected.report.rows_by_layer
    assert found.report.num_reused == expected.report.num_reused
    assert found.logits.device.type == torch.device(DEVICE).type
    torch.testing.assert_close(found.logits.cpu(), expected.logits, rtol=0, atol=5e-2)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reuse": False},
        {"ratio": 1.0},
        {"policy": "query:shift=0.8"},
        {"eviction": "streaming:recent=16"},
        {"eviction": "corm:recent=16"},
        {"eviction": "snapkv:budget=40"},
        {"eviction": "h2o:heavy=20:recent=20"},
        {"ttft": 10.0},
        {"repetition_penalty": 1.3},
    ],
    ids=str,
)
def test_an_answer(indexes: tuple[Index, Index], options: dict[str, object]) -> None:
    answers = [
        KVEngine(index, max_tokens=12).generate(PROMPT, **options)  # type: ignore[arg-type]
        for index in indexes
    ]
    assert answers[1].text == answers[0].text


def test_a_conversation_and_a_batch(indexes: tuple[Index, Index]) -> None:
    here, there = (KVEngine(index, max_tokens=8, session_bytes=1 << 30) for index in indexes)
    answer = there.generate(PROMPT)
    assert answer.text == here.generate(PROMPT).text
    longer = f"{PROMPT}{answer.text}\n\nAnd who keeps the light?"
    again = there.generate(longer)
    assert again.report.num_kept > 0
    assert again.text == here.generate(longer).text
    requests = [Request(PROMPT), Request(longer, policy="none"), Request(TEXTS[1])]
    batches = [engine.generate_batch(requests) for engine in (here, there)]
    assert [one.text for one in batches[1]] == [one.text for one in batches[0]]


@pytest.mark.parametrize("policy", POLICIES)
def test_captured_rows(indexes: tuple[Index, Index], policy: str) -> None:
    here, there = (KVEngine(index, session_bytes=0) for index in indexes)
    expected = here.fuse(PROMPT, policy=policy)
    first = there.fuse(PROMPT, policy=policy)
    model = there.index.model
    model.capture_rows()
    assert not model.lacks_graphs
    again = there.fuse(PROMPT, policy=policy)
    assert not model.lacks_graphs
    for found in (first, again):
        torch.testing.assert_close(found.logits.cpu(), expected.logits, rtol=0, atol=5e-2)


@pytest.mark.parametrize("policy", ["none", "two_stage"])
def test_prompts_that_wait_at_the_same_time(indexes: tuple[Index, Index], policy: str) -> None:
    questions = ("Who keeps the ledger?", "And who keeps the light?", "What is weighed?")
    requests = [Request(PROMPT + one, policy=policy) for one in questions]
    here, there = (KVEngine(index, max_tokens=6, session_bytes=0) for index in indexes)
    expected = [here.generate(one).text for one in requests]
    for _ in range(3):  # by operations, then by graphs that were captured after it
        assert [one.text for one in there.generate_batch(requests)] == expected
        there.index.model.capture_rows()


def test_captured_steps(indexes: tuple[Index, Index]) -> None:
    here, there = (KVEngine(index, max_tokens=12) for index in indexes)
    expected = here.generate(PROMPT).text
    with torch.inference_mode():
        assert there.generate(PROMPT).text == expected
    steps = list(there.index.model._captured._steps.values())
    assert steps
    assert there.generate(PROMPT).text == expected
    model = there.index.model
    assert list(model._captured._steps.values())[: len(steps)] == steps
    # Weights that move are found again, and the old ones are kept.
    before = [parameter.data for parameter in model.hf.parameters()]
    model.hf.to("cpu")
    model.hf.to(DEVICE)
    assert there.generate(PROMPT).text == expected
    assert list(model._captured._steps.values()) != steps
    del before
    requests = [Request(PROMPT), Request(TEXTS[1]), Request(TEXTS[2], eviction="streaming")]
    batches = [engine.generate_batch(requests) for engine in (here, there)]
    assert [one.text for one in batches[1]] == [one.text for one in batches[0]]


def test_records_are_written_from_a_gpu(tmp_path: Path) -> None:
    model = KVModel.load("kvrag-tiny", device=DEVICE)
    folder = tmp_path / "index"
    with text_index(folder, model) as index:
        expected = KVEngine(index).fuse(PROMPT, policy="none")
    with Index.open(folder, device="cpu") as index:
        found = KVEngine(index).fuse(PROMPT, policy="none")
    torch.testing.assert_close(found.logits, expected.logits.cpu(), rtol=0, atol=5e-2)
