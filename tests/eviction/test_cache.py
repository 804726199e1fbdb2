"""The cache in real layers: against the full cache, and against slow attention with CORM's rule."""

import copy
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.masking_utils import eager_mask

from kvrag.errors import ParameterError
from kvrag.eviction.cache import EvictingCache
from kvrag.eviction.registry import make_eviction
from kvrag.models.writers import CACHE_ARGUMENT
from tests.eviction.policies import KeepAll, SlowCorm
from tests.support.models import FAMILIES, LEARNED_POSITIONS, make_model

PAD = 2


def prompts(num_prompts: int = 3, length: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and mask, padded on the left by 0, 7, 14 and so on."""
    ids = torch.randint(3, 380, (num_prompts, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for number in range(num_prompts):
        ids[number, : 7 * number] = PAD
        mask[number, : 7 * number] = 0
    return ids, mask


def generate(
    model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, num_new: int, cache: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens ``[B, n]`` and logits ``[B, n, V]`` of greedy generation."""
    given = model.generate(
        ids,
        attention_mask=mask,
        **{CACHE_ARGUMENT: cache},
        max_new_tokens=num_new,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=PAD,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return given.sequences[:, ids.shape[1] :], torch.stack(given.logits, dim=1)


def evicting(
    model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, num_new: int, policy: Any
) -> tuple[torch.Tensor, torch.Tensor, EvictingCache]:
    cache = EvictingCache(model, policy)
    with cache.attending(model):
        tokens, logits = generate(model, ids, mask, num_new, cache)
    return tokens, logits, cache


def model_of(family: str, implementation: str, dtype: torch.dtype = torch.float32) -> Any:
    model = make_model(family, dtype=dtype)
    model.config._attn_implementation = implementation
    return model


# Transformers' own sdpa knows no soft-capping.
@pytest.mark.parametrize(
    ("family", "implementation"),
    [
        *((family, "sdpa") for family in (*FAMILIES, *LEARNED_POSITIONS) if family != "gemma2"),
        *((family, "eager") for family in ("llama", "gemma2", "gemma3", "gpt2")),
    ],
)
def test_what_evicts_nothing_equals_the_full_cache(family: str, implementation: str) -> None:
    """Also over more tokens than a block has room for, in batches, and behind sliding windows."""
    model = model_of(family, implementation)
    ids, mask = prompts()
    num_new = 70 if family in ("llama", "gemma3") else 20
    tokens, logits = generate(model, ids, mask, num_new, DynamicCache(config=model.config))
    kept, kept_logits, cache = evicting(model, ids, mask, num_new, KeepAll())
    assert torch.equal(kept, tokens)
    torch.testing.assert_close(kept_logits, logits, atol=5e-5, rtol=0)
    report = cache.report()
    windows = "sliding" in family or family.startswith("gemma")
    assert (report.kept_share < 0.8) == windows
    num_padding = 7 + 14
    assert report.num_prompt == 3 * 40 - num_padding
    assert report.num_tokens == 3 * (39 + num_new) - num_padding


class SlowAttention:
    """Attention with a loop for everything, over all keys, of which some count no more."""

    def __init__(self, num_kv_heads: int, *rule: float) -> None:
        self.heads: dict[tuple[int, int, int], SlowCorm] = {}
        self._new = lambda: SlowCorm(*rule)
        self._num_kv_heads = num_kv_heads

    def __call__(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float,
        softcap: float | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        num_prompts, num_heads, num_rows, _ = query.shape
        group = num_heads // self._num_kv_heads
        output = torch.zeros_like(query)
        for prompt in range(num_prompts):
            for own in range(self._num_kv_heads):
                slow = self.heads.setdefault((module.layer_idx, prompt, own), self._new())
                for row in range(num_rows):
                    behind = key.shape[2] - num_rows + row
                    seen = list(range(behind + 1))
                    if attention_mask is not None:
                        seen = [p for p in seen if attention_mask[prompt, 0, row, p] == 0]
                    # Padding is no token: of keys, the first that the last query sees is the first.
                    if num_rows == 1:
                        slow.alive.add(behind)
                        slow.num_seen = behind + 1
                        seen = [place for place in seen if place in slow.alive]
                    if not seen or seen[-1] != behind:
                        continue
                    noted = []
                    for head in range(own * group, (own + 1) * group):
                        scores = torch.tensor(
                            [float(query[prompt, head, row] @ key[prompt, own, p]) for p in seen]
                        )
                        scores *= scaling
                        if softcap is not None:
                            scores = torch.tanh(scores / softcap) * softcap
                        weights = scores.softmax(0)
                        noted.append(dict(zip(seen, weights.tolist(), strict=True)))
                        output[prompt, head, row] = weights @ value[prompt, own, seen]
                    slow.note(noted)
                    if row == num_rows - 1:
                        if num_rows > 1:
                            slow.begin(num_rows)
                            slow.alive = set(seen)
                        slow.evict()
        return output.transpose(1, 2).contiguous(), None


@pytest.mark.parametrize(
    ("family", "window", "recent", "threshold"),
    [("llama", 6, 4, 1.0), ("llama", 40, 3, 4.0), ("gemma2", 5, 7, 2.0), ("gemma3", 6, 4, 1.0)],
)
def test_corm_equals_slow_attention_that_forgets(
    family: str, window: int, recent: int, threshold: float
) -> None:
    """Tokens, logits, and every head's keys, in a batch with padding and with sliding windows."""
    model = model_of(family, "eager")
    ids, mask = prompts(2, 36)
    slow = SlowAttention(2, window, recent, threshold)
    AttentionInterface.register("slow_corm", slow)
    AttentionMaskInterface.register("slow_corm", eager_mask)
    model.config._attn_implementation = "slow_corm"
    # A cache that holds all rows: a sliding one would drop those that the slow account counts.
    cache = DynamicCache()
    tokens, logits = generate(model, ids, mask, 14, cache)
    model.config._attn_implementation = "eager"
    policy = make_eviction(f"corm:window={window}:recent={recent}:threshold={threshold}")
    kept, kept_logits, evicted = evicting(model, ids, mask, 14, policy)
    assert torch.equal(kept, tokens)
    torch.testing.assert_close(kept_logits, logits, atol=5e-5, rtol=0)
    sliding = getattr(model.config, "sliding_window", None)
    types = getattr(model.config, "layer_types", None) or ["full_attention"] * 4
    for layer_index, kind in enumerate(types):
        for head, places in enumerate(evicted.kept(layer_index)):
            prompt, own = divmod(head, 2)
            alive = {p - 7 * prompt for p in slow.heads[layer_index, prompt, own].alive}
            if kind == "sliding_attention":
                alive = {p for p in alive if p > 49 - 7 * prompt - sliding}
            assert set(places.tolist()) == alive
    assert 0.1 < evicted.report().kept_share < 0.95


@pytest.mark.parametrize(
    "policy",
    [
        "corm:window=8:recent=4",
        "streaming:sinks=2:recent=9",
        "h2o:heavy=6:recent=5:window=9",
        "snapkv:budget=12:window=4:pool=3",
    ],
)
def test_a_prompt_in_a_batch_is_answered_as_alone(policy: str) -> None:
    model = model_of("llama", "sdpa")
    ids, mask = prompts()
    together, logits, cache = evicting(model, ids, mask, 12, policy)
    for number in range(len(ids)):
        alone = ids[number : number + 1, 7 * number :]
        tokens, own_logits, own = evicting(model, alone, torch.ones_like(alone), 12, policy)
        assert torch.equal(tokens, together[number : number + 1])
        torch.testing.assert_close(own_logits, logits[number : number + 1], atol=5e-5, rtol=0)
        for layer_index in range(4):
            heads = cache.kept(layer_index)[2 * number : 2 * number + 2]
            for one, other in zip(own.kept(layer_index), heads, strict=True):
                assert torch.equal(one, other)
    assert cache.report().kept_share < 0.95


@pytest.mark.parametrize(
    "policy", ["corm:window=8:recent=4", "streaming:sinks=2:recent=9", "h2o:heavy=6:recent=5"]
)
def test_several_tokens_at_once_are_as_one_after_another(policy: str) -> None:
    model = model_of("gemma3", "sdpa")
    ids, _ = prompts(1)
    step, whole = EvictingCache(model, policy), EvictingCache(model, policy)
    with torch.no_grad(), step.attending(model):
        model(ids[:, :30], **{CACHE_ARGUMENT: step})
        single = [model(ids[:, i : i + 1], **{CACHE_ARGUMENT: step}).logits for i in range(30, 40)]
        model(ids[:, :30], **{CACHE_ARGUMENT: whole})
        several = model(ids[:, 30:], **{CACHE_ARGUMENT: whole}).logits
    torch.testing.assert_close(several, torch.cat(single, dim=1), atol=5e-5, rtol=0)
    for layer_index in range(4):
        for one, other in zip(step.kept(layer_index), whole.kept(layer_index), strict=True):
            assert torch.equal(one, other)


def test_what_is_forgotten_leaves_memory() -> None:
    model = model_of("llama", "sdpa")
    ids, mask = prompts(1, 800)
    _, _, cache = evicting(model, ids, mask, 100, "streaming:sinks=4:recent=60")
    report = cache.report()
    full = 899 * 4 * 2 * 2 * 16 * 4
    assert report.full_bytes == full
    assert report.prompt_share == pytest.approx(64 / 800)
    assert report.kept_share == pytest.approx(64 / 899)
    assert report.kept_by_layer == (report.kept_share,) * 4
    # 64 rows and room for as many, with 13 bytes of notes beside the 128 of a row.
    assert report.size_bytes <= 4 * 2 * (2 * 64) * (128 + 13)
    # Never more than one layer's prompt beside what was left of the others.
    assert report.peak_bytes <= full / 4 + report.size_bytes
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for layer in cache.layers
        for tensor in (layer.kv.keys, layer.kv.values)
    }
    assert sum(storages.values()) < report.size_bytes


def test_copies_go_their_own_ways() -> None:
    model = model_of("llama", "sdpa")
    ids, _ = prompts(1)
    cache = EvictingCache(model, "corm:window=8:recent=4")
    with torch.no_grad(), cache.attending(model):
        model(ids, **{CACHE_ARGUMENT: cache})
        other = copy.deepcopy(cache)
        before = cache.kept(0)
        ends = [
            model(torch.tensor([[5, 6, 7]]), **{CACHE_ARGUMENT: one}).logits
            for one in (other, cache)
        ]
        assert torch.equal(*ends)
    assert other.get_seq_length() == cache.get_seq_length() == 43
    assert not all(map(torch.equal, before, cache.kept(0)))


def test_only_its_own_forwards_are_served() -> None:
    """A forward of somebody else in between, with the full cache or none, is the ordinary one."""
    model = model_of("llama", "sdpa")
    ids, _ = prompts(1)
    cache = EvictingCache(model, "streaming:recent=4")
    with torch.no_grad():
        plain = model(ids).logits
        with cache.attending(model):
            model(ids, **{CACHE_ARGUMENT: cache})
            assert torch.equal(model(ids).logits, plain)
        assert model.config._attn_implementation == "sdpa"
        with pytest.raises(ParameterError, match=r"inside 'with cache\.attending\(model\):'"):
            model(ids[:, :1], **{CACHE_ARGUMENT: cache})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types_stay_near_the_full_cache(dtype: torch.dtype) -> None:
    model = model_of("llama", "sdpa", dtype)
    ids, mask = prompts(1)
    _, logits = generate(model, ids, mask, 1, DynamicCache(config=model.config))
    cache = EvictingCache(model, KeepAll())
    token = logits[:, -1].argmax(-1, keepdim=True)
    with torch.no_grad():
        plain = model(torch.cat([ids, token], dim=1)).logits[:, -1]
        with cache.attending(model):
            model(ids, **{CACHE_ARGUMENT: cache})
            stepped = model(token, **{CACHE_ARGUMENT: cache}).logits[:, -1]
    exact = make_model("llama")(torch.cat([ids, token], dim=1)).logits[:, -1]
    off = (plain.float() - exact).abs().max()
    assert (stepped.float() - exact).abs().max() < 2 * off + 1e-3
