"""Batches over one copy of the modules, against each prompt alone."""

from pathlib import Path
from typing import Any

import pytest
import torch

from kvrag.engine.engine import KVEngine
from kvrag.errors import ParameterError
from kvrag.fusion.slices import MISS_DAMAGED
from kvrag.pml.batch import SharedPrompts, generate_batch
from kvrag.pml.engine import PMLEngine
from kvrag_testing.bench_top import relative_difference
from tests.pml.test_engine import WHOLE
from tests.support.rag import text_index

PROMPTS = [
    "<prompt schema='s'><m0/><m2/> Who keeps it?</prompt>",
    "<prompt schema='s'><m0/><m1/><m2/><m3/> When was that?</prompt>",
    "<prompt schema='s'> Anything?</prompt>",
    "<prompt schema='s'><m0/><m2/> And who repairs the clock?</prompt>",
]


@pytest.fixture(params=["llama", "mistral-sliding", "gemma3", "bloom", "gpt2", "falcon-alibi"])
def pml(request: pytest.FixtureRequest, tmp_path: Path):
    with text_index(tmp_path / "index", request.param, ()) as index:
        engine = PMLEngine(KVEngine(index))
        engine.encode(WHOLE)
        yield engine


def test_a_batch_is_each_prompt_alone(pml: PMLEngine, request: pytest.FixtureRequest) -> None:
    # Windows reach over positions here, over rows where a prompt is fused alone.
    is_windowed = any(pml.engine.index.model.windows)
    prompts = [PROMPTS[1]] if is_windowed else PROMPTS
    found = generate_batch(pml, prompts, max_tokens=6)
    alone = [pml.generate(one, policy="none", max_tokens=6) for one in prompts]
    assert list(found.texts) == [answer.text for answer in alone]
    assert found.report.num_tokens == sum(answer.report.num_tokens for answer in alone)


def test_modules_are_in_memory_once(pml: PMLEngine) -> None:
    model = pml.engine.index.model
    prompts = [PROMPTS[1]] * 8
    report = generate_batch(pml, prompts, max_tokens=2).report
    layout = pml.place(PROMPTS[1]).layout
    fresh = len(layout.token_ids) - layout.num_reused
    rows = layout.num_reused + 8 * (fresh + 2)
    assert report.num_shared_rows == layout.num_reused
    assert report.buffer_bytes == rows * model.spec.bytes_per_token
    assert report.buffer_bytes < report.separate_bytes / 3
    # Read once as well.
    one = pml.engine.fuse(pml.place(PROMPTS[1]), policy="none").report
    assert report.bytes_loaded == one.bytes_loaded


def test_damage_is_computed_and_counted(pml: PMLEngine) -> None:
    index = pml.engine.index
    passage = pml.add(WHOLE).passages[0]
    key = pml.passages.key_of(passage)
    record = index.store.open(key)
    content = bytearray(record.size_bytes)
    record.read_into(0, memoryview(content))
    record.close()
    content[-1] ^= 1
    index.store.replace(key, bytes(content))
    found = generate_batch(pml, PROMPTS[:2], max_tokens=3)
    assert found.report.misses == {MISS_DAMAGED: 1}
    placed = [pml.place(one) for one in PROMPTS[:2]]
    shared = SharedPrompts(index.model, [one.layout for one in placed], placed[0].open_kv, room=1)
    for one, logits in zip(placed, shared.logits, strict=True):
        if not any(index.model.windows):
            alone = pml.engine.fuse(one, policy="none").logits
            assert relative_difference(logits, alone) < 1e-4


def test_batches_are_of_one_schema_and_of_something(pml: PMLEngine) -> None:
    with pytest.raises(ParameterError, match="0 prompts"):
        generate_batch(pml, [])
    with pytest.raises(ParameterError, match="put the prompt into a list"):
        generate_batch(pml, PROMPTS[0])
    pml.add("<schema name='t'>x</schema>")
    with pytest.raises(ParameterError, match="schemas s, t"):
        generate_batch(pml, [PROMPTS[0], "<prompt schema='t'>x</prompt>"])


def test_a_batch_forgets_nothing(pml: PMLEngine) -> None:
    forgetful = PMLEngine(KVEngine(pml.engine.index, eviction="corm"))
    forgetful.add(WHOLE)
    with pytest.raises(ParameterError, match="cannot be forgotten for one of them"):
        generate_batch(forgetful, PROMPTS)


def test_what_memory_held_before_is_never_seen(
    pml: PMLEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    clean = generate_batch(pml, PROMPTS, max_tokens=6).texts
    empty = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = empty(*args, **kwargs)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", poisoned)
    assert generate_batch(pml, PROMPTS, max_tokens=6).texts == clean
