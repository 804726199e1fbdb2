"""Each policy over weights made up, step by step, against a slow account of the same rule."""

import pytest
import torch

from kvrag.errors import ParameterError
from kvrag.eviction.base import EvictionPolicy, HeldKeys
from kvrag.eviction.cache import EvictingLayer, _Memory
from kvrag.eviction.registry import CormPolicy, make_eviction
from kvrag_testing.baselines import H2OPolicy, SnapKVPolicy, StreamingPolicy


@pytest.mark.parametrize(
    ("spec", "num_kept"),
    [("h2o:share=0.25", 10), ("snapkv:share=0.5", 20), ("streaming:share=0.5", 20)],
)
def test_a_share_of_the_prompt_is_kept(spec: str, num_kept: int) -> None:
    policy = make_eviction(spec)
    held = HeldKeys.of_prompts(torch.ones(1, 40, dtype=torch.bool), 2)
    layer = EvictingLayer(policy, None, 0, _Memory(1))
    weights = torch.rand(2, 2, min(policy.num_queries, 40), 40)
    policy.observe(held, weights, torch.full((weights.shape[2],), 40))
    layer.keep(held, torch.rand(1, 2, 40, 4), torch.rand(1, 2, 40, 4))
    kept = layer.kv.kept()
    assert [len(one) for one in kept] == [num_kept, num_kept]
    if spec.startswith("streaming"):  # the first four, and the last
        assert kept[0].tolist() == [*range(4), *range(24, 40)]


def test_snapkv_chooses_once_and_in_stretches() -> None:
    policy = SnapKVPolicy(budget=6, window=2, pool=3)
    layer = EvictingLayer(policy, None, 0, _Memory(1))
    held = HeldKeys.of_prompts(torch.ones(1, 12, dtype=torch.bool), 1)
    weights = torch.zeros(1, 2, 2, 12)
    weights[0, 0, 1, 5] = 0.5
    weights[0, 1, 0, 0] = 0.1
    policy.observe(held, weights, torch.tensor([11, 12]))
    layer.keep(held, torch.rand(1, 1, 12, 4), torch.rand(1, 1, 12, 4))
    kept = layer.kv.kept()[0].tolist()
    assert set(kept) >= {4, 5, 6, 10, 11}
    assert len(kept) == 6
    assert kept[0] in (0, 1)
    layer.append(torch.rand(1, 4), torch.rand(1, 4))
    layer.evict(torch.zeros(1, 2, 7))
    assert layer.kv.kept()[0].tolist() == [*kept, 12]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("cormm", "unknown eviction 'cormm'; known: none, corm, streaming, h2o, snapkv"),
        ("corm:window=0", "window=0: expected 1 or more"),
        ("corm:window=99999999999999999999", "at most 2147483648"),
        ("streaming:sinks=99999999999999999999", "at most 2147483648"),
        ("corm:recent=-2", "recent=-2: expected 1 or more"),
        ("corm:window=2.5", "window=2.5 has the wrong type: expected a whole number"),
        ("corm:windows=2", "'corm' has no parameter windows; it has recent, threshold, window"),
        ("corm:window", "expected PARAMETER=VALUE, found 'window'"),
        ("corm:threshold=0", "threshold=0: expected more than 0, and finite"),
        ("corm:threshold=nan", "threshold=nan: expected more than 0, and finite"),
        ("corm:threshold=inf", "threshold=inf: expected more than 0, and finite"),
        ("corm:window=1:window=2", "gives window twice"),
        ("none:share=0.5", "'none' takes no parameters"),
        ("streaming:recent=4:share=0.5", "replaces recent=4: leave one out"),
        ("streaming:sinks=-1", "sinks=-1: expected 0 or more"),
        ("streaming:share=0", "expected a share above 0, at most 1"),
        ("h2o:share=1.5", "expected a share above 0, at most 1"),
        ("h2o:share=0.5:heavy=3", "replaces heavy=3"),
        ("h2o:heavy=0", "heavy=0: expected 1 or more"),
        ("snapkv:pool=4", "pool=4: expected an odd number"),
        ("snapkv:budget=4:share=0.5", "replaces budget=4"),
        ("snapkv:share=nan", "expected a share above 0, at most 1"),
    ],
)
def test_specs_that_cannot_be(spec: str, message: str) -> None:
    with pytest.raises(ParameterError, match=message.replace("(", r"\(")):
        make_eviction(spec)


@pytest.mark.parametrize(
    ("spec", "policy", "told"),
    [
        ("corm", CormPolicy(256, 256), "corm(window=256, recent=256, threshold=1.0)"),
        ("corm:window=16:recent=8", CormPolicy(16, 8), "corm(window=16, recent=8, threshold=1.0)"),
        ("streaming", StreamingPolicy(4, 1020), "streaming(sinks=4, recent=1020)"),
        ("h2o", H2OPolicy(768, 256), "h2o(heavy=768, recent=256, window=256)"),
        ("snapkv:share=0.5", SnapKVPolicy(share=0.5), "snapkv(share=0.5, window=32, pool=7)"),
    ],
)
def test_specs_that_can_be(spec: str, policy: EvictionPolicy, told: str) -> None:
    """What a report says can be asked for again."""
    assert make_eviction(spec) == make_eviction(policy) == make_eviction(told) == policy
    assert str(policy) == told
