"""What an evicting cache cannot do is said, and what it holds is never mistaken for something."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from kvrag.errors import ParameterError, UnsupportedModelError
from kvrag.eviction.cache import EvictingCache
from kvrag.models.writers import CACHE_ARGUMENT
from tests.eviction.policies import KeepAll
from tests.eviction.test_cache import PAD, evicting, generate, model_of, prompts
from tests.support.models import OTHER_POSITIONS, make_model


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


def _beams(cache: EvictingCache, model: PreTrainedModel, ids: torch.Tensor) -> None:
    model.generate(ids, **{CACHE_ARGUMENT: cache}, num_beams=2, max_new_tokens=3, pad_token_id=PAD)


def _lookup(cache: EvictingCache, model: PreTrainedModel, ids: torch.Tensor) -> None:
    given: dict[str, Any] = {CACHE_ARGUMENT: cache, "eos_token_id": None, "pad_token_id": PAD}
    model.generate(ids, **given, max_new_tokens=8, do_sample=False, prompt_lookup_num_tokens=3)


def _another_batch(cache: EvictingCache, model: PreTrainedModel, ids: torch.Tensor) -> None:
    with torch.no_grad():
        model(ids, **{CACHE_ARGUMENT: cache})
        model(ids[:, :1].repeat(2, 1), **{CACHE_ARGUMENT: cache})


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (_beams, "does not support beams: generate with num_beams=1"),
        (_another_batch, "of 1 prompts was given 2"),
        # Transformers refuses from 5.24 on, before it asks the cache.
        (_lookup, "cannot remove tokens|cache that can be cropped"),
        (lambda cache, *_: cache.report(), "without a prompt"),
        (lambda cache, *_: cache.kept(0), "without a prompt"),
        (lambda _, model, __: EvictingCache(model, "none"), "use another cache"),
    ],
)
def test_what_it_cannot_do_is_refused(ask: Callable[..., object], message: str) -> None:
    model = model_of("llama", "sdpa")
    cache = EvictingCache(model, "corm:window=4:recent=4")
    refusals = (ParameterError, ValueError)
    with cache.attending(model), pytest.raises(refusals, match=message):
        ask(cache, model, prompts(1)[0])


@pytest.mark.parametrize("family", OTHER_POSITIONS)
def test_models_that_attend_in_their_own_code_are_refused(family: str) -> None:
    with pytest.raises(UnsupportedModelError, match="leave eviction out"):
        EvictingCache(make_model(family), "corm")


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
