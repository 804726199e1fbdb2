"""What an evicting cache cannot do is said, and what it holds is never mistaken for something."""

from __future__ import annotations

import pytest
import torch

from kvrag.errors import ParameterError
from kvrag.eviction.base import HeldKeys
from kvrag.eviction.cache import EvictingCache, Score, attend_ragged
from kvrag.eviction.ragged import RaggedKV
from kvrag.models.caches import CACHE_ARGUMENT
from tests.eviction.policies import KeepAll
from tests.eviction.test_cache import PAD, evicting, generate, model_of, prompts


def test_capped_scores_give_nothing_to_keys_that_a_head_does_not_hold() -> None:
    torch.manual_seed(0)
    keys, values, query = torch.randn(1, 2, 6, 4), torch.randn(1, 2, 6, 4), torch.randn(2, 3, 4)
    held = torch.arange(6) < torch.tensor([[6], [3]])
    column = torch.full((2, 1), 6)
    places = torch.arange(6).repeat(2, 1)
    known = HeldKeys(places, held, torch.zeros(2, 6), column, column, torch.zeros_like(column))
    # A cap as low as the scores: what is capped to -1 would draw much.
    score = Score(0.5, softcap=1.0)
    output, weights = attend_ragged(query, RaggedKV(keys, values, known), score)
    assert torch.equal(weights[1, :, 3:], torch.zeros(3, 3))
    expected = torch.tanh(query[1] * 0.5 @ keys[0, 1, :3].T).softmax(-1)
    torch.testing.assert_close(weights[1, :, :3], expected)
    torch.testing.assert_close(output[1], expected @ values[0, 1, :3])


@pytest.mark.parametrize("family", ["llama", "mistral-sliding", "gemma3"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("where", ["nowhere", "behind a finished answer", "before the next turn"])
def test_padding_behind_prompts_is_refused(family: str, implementation: str, where: str) -> None:
    model = model_of(family, implementation)
    ids, mask = prompts()
    cache = EvictingCache(model, KeepAll())
    with cache.attending(model):
        first, _ = generate(model, ids, mask, 5, cache)
        more = torch.ones(3, 8, dtype=mask.dtype)
        if where != "nowhere":
            more[1, 2 if where == "behind a finished answer" else 5] = 0
        turn = torch.randint(3, 380, (3, 3), generator=torch.Generator().manual_seed(3))
        ids = torch.cat([ids, first, turn], dim=1).masked_fill(
            torch.cat([mask, more], dim=1) == 0, PAD
        )
        mask = torch.cat([mask, more], dim=1)
        if where != "nowhere":
            with pytest.raises(ParameterError, match="padding after the prompts"):
                generate(model, ids, mask, 4, cache)
            return
        second, logits = generate(model, ids, mask, 4, cache)
    expected, expected_logits = generate(model, ids, mask, 4, None)
    assert torch.equal(second, expected)
    torch.testing.assert_close(logits, expected_logits, rtol=1e-3, atol=1e-4)


def test_before_a_prompt_there_is_nothing_to_tell() -> None:
    model = model_of("llama", "sdpa")
    cache = EvictingCache(model, "corm")
    with pytest.raises(ParameterError, match="without a prompt"):
        cache.report()
    with pytest.raises(ParameterError, match="without a prompt"):
        cache.kept(0)


def test_no_token_is_taken_back() -> None:
    model = model_of("llama", "sdpa")
    ids, mask = prompts(1)
    cache = EvictingCache(model, "corm:window=4:recent=4")
    # Transformers refuses from 5.24 on, before it asks the cache.
    refusals = (ParameterError, ValueError)
    message = "cannot remove tokens|cache that can be cropped"
    with cache.attending(model), pytest.raises(refusals, match=message):
        model.generate(
            ids,
            attention_mask=mask,
            **{CACHE_ARGUMENT: cache},
            max_new_tokens=8,
            do_sample=False,
            prompt_lookup_num_tokens=3,
            eos_token_id=None,
            pad_token_id=PAD,
        )


def test_a_reset_cache_tells_of_what_came_since() -> None:
    model = model_of("llama", "sdpa")
    long, short = prompts(3), prompts(1)
    fresh = evicting(model, *short, 5, "corm:window=4:recent=4")[2].report()
    cache = evicting(model, *long, 5, "corm:window=4:recent=4")[2]
    assert cache.report() != fresh
    cache.reset()
    with cache.attending(model):
        generate(model, *short, 5, cache)
    assert cache.report() == fresh
