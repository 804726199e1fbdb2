"""Eviction in the engine: behind fused prompts of every kind, reported, refused where it must."""

import gc
import json
import mmap
import weakref
from pathlib import Path

import pytest
import torch

from kvrag.engine.engine import KVEngine
from kvrag.errors import ParameterError, UnsupportedModelError
from kvrag.eviction.cache import EvictingCache
from kvrag.fusion.evicting import evict_prompt
from kvrag.fusion.links import FILE_NAME
from kvrag.ingest.index import Index
from kvrag.kvcache import FusedKV
from kvrag.models.writers import CACHE_ARGUMENT
from kvrag.pml.engine import PMLEngine
from tests.engine.test_links import PROMPT
from tests.eviction.policies import KeepAll
from tests.fusion.test_links import make_links
from tests.pml.test_engine import GAPPED, WHOLE
from tests.support.rag import text_index

CORM = "corm:window=9:recent=6"


@pytest.mark.parametrize("way", ["embeddings", "adapter"])
def test_behind_link_tokens(index: Index, tmp_path: Path, way: str) -> None:
    make_links(index.model, way).save(tmp_path / FILE_NAME)
    engine = KVEngine(index, policy="none", max_tokens=10, links=tmp_path / FILE_NAME)
    assert engine.generate(PROMPT, eviction=KeepAll()).text == engine.generate(PROMPT).text
    report = engine.generate(PROMPT, eviction=CORM).report
    # Link tokens are rows that may be kept like any other.
    assert report.eviction.num_prompt == report.num_tokens + report.num_links


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_behind_modules_with_gaps_in_their_positions(tmp_path: Path, family: str) -> None:
    with text_index(tmp_path / "index", family) as index:
        engine = KVEngine(index, max_tokens=12)
        pml = PMLEngine(engine)
        pml.encode(WHOLE)
        placed = pml.place(GAPPED)
        assert placed.layout.positions is not None
        assert engine.generate(placed, eviction=KeepAll()).text == engine.generate(placed).text


@pytest.mark.parametrize(
    ("family", "spec"),
    [
        ("llama", CORM),
        ("gemma2", "h2o:share=0.4:window=11"),
        ("gemma3", "snapkv:share=0.3:window=7"),
    ],
)
def test_a_prompt_recomputed_whole_is_pruned_as_a_plain_prefill(
    tmp_path: Path, family: str, spec: str
) -> None:
    """The queries that stored chunks do not bring are those that a prefill would have had."""
    with text_index(tmp_path / "index", family) as index:
        model = index.model
        engine = KVEngine(index, policy="deviation", ratio=1.0)
        fused = engine.fuse(PROMPT)
        cache = evict_prompt(model, fused, spec)
        plain = EvictingCache(model.hf, spec)
        ids = torch.tensor([engine.prompt_ids(PROMPT)])
        with torch.no_grad(), plain.attending(model.hf):
            model.hf(ids, **{CACHE_ARGUMENT: plain})
        for layer_index in range(model.spec.num_layers):
            for one, other in zip(cache.kept(layer_index), plain.kept(layer_index), strict=True):
                assert torch.equal(one, other)
        assert cache.report().prompt_share < 1.0
        answer = engine.generate(PROMPT, eviction=spec, max_tokens=10)
        with plain.attending(model.hf):
            output = model.hf.generate(
                ids,
                **{CACHE_ARGUMENT: EvictingCache(model.hf, spec)},
                max_new_tokens=10,
                do_sample=False,
                pad_token_id=2,
            )
        generated = output[0, ids.shape[1] :]
        assert model.tokenizer.decode(generated, skip_special_tokens=True) == answer.text


def test_the_report_says_what_was_kept(index: Index) -> None:
    answer = KVEngine(index, eviction=CORM, max_tokens=10).generate(PROMPT)
    eviction = answer.report.eviction
    assert eviction.policy == "corm(window=9, recent=6, threshold=1.0)"
    assert eviction.num_prompt == answer.usage.prompt_tokens
    assert eviction.num_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens - 1
    assert 0.0 < eviction.prompt_share < 1.0
    assert len(eviction.kept_by_layer) == index.model.spec.num_layers
    assert eviction.peak_bytes > eviction.size_bytes
    shown = f"{eviction.kept_share:.0%} of the KV kept by corm(window=9, recent=6, threshold=1.0)"
    assert shown in answer.report.one_line()
    assert json.loads(json.dumps(answer.to_dict()))["report"]["eviction"]["num_prompt"] > 0


def test_a_call_overrides_the_engine(index: Index) -> None:
    engine = KVEngine(index, eviction=CORM, max_tokens=3)
    assert engine.generate(PROMPT, eviction="none").report.eviction is None
    streaming = engine.generate(PROMPT, eviction="streaming:recent=9").report.eviction
    assert streaming.policy == "streaming(sinks=4, recent=9)"
    # The first token needs nothing of the cache.
    assert engine.generate(PROMPT, max_tokens=1).report.eviction is None


def test_the_prompts_buffer_leaves_memory(index: Index) -> None:
    """Of a tensor over a mapping, the mapping lives as long as anything looks at it."""
    elements = FusedKV.storage_elements(index.model.spec, 1000)
    for eviction in (CORM, "none"):
        memory = mmap.mmap(-1, 4 * elements)
        engine = KVEngine(index, eviction=eviction, max_tokens=3)
        engine._fuser.buffers._spare = (torch.frombuffer(memory, dtype=torch.float32), None)
        alive = weakref.ref(memory)
        del memory
        answer = engine.generate(PROMPT)
        assert answer.usage.completion_tokens == 3
        gc.collect()
        assert (alive() is None) == (eviction == CORM)


def test_refusals(index: Index, tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="unknown eviction 'lru'"):
        KVEngine(index, eviction="lru")
    engine = KVEngine(index)
    with pytest.raises(ParameterError, match="has no parameter budget"):
        engine.generate(PROMPT, eviction="corm:budget=3")
    with (
        text_index(tmp_path / "bloom", "bloom") as bloom,
        pytest.raises(UnsupportedModelError, match="leave eviction out"),
    ):
        KVEngine(bloom).stream(PROMPT, eviction=CORM)


def test_prompts_go_on_behind_one_that_forgot(index: Index) -> None:
    """The buffer that was let go of is never anybody's memory again."""
    engine = KVEngine(index, max_tokens=6)
    expected = engine.generate(PROMPT).text
    for _ in range(2):
        engine.generate(PROMPT, eviction=CORM)
        assert engine.generate(PROMPT).text == expected
    stream = engine.stream(PROMPT, eviction=CORM)
    next(stream)
    stream.close()
    assert engine.generate(PROMPT).text == expected
