"""`kvrag bench eviction`: a decode step over what eviction leaves, against the full cache's.

One prompt is computed once; every policy prunes a copy of it. Steps of all caches are timed in
turn, token by token, so that a machine that drifts drifts for all.
"""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kvrag.engine.engine import KVEngine
from kvrag.errors import ParameterError
from kvrag.eviction.base import EvictionPolicy
from kvrag.eviction.cache import EvictingCache, Score
from kvrag.eviction.registry import make_eviction
from kvrag.fusion.decoding import CacheDecoder, Decoder
from kvrag.fusion.evicting import EvictingDecoder
from kvrag.fusion.fuser import FusedPrompt
from kvrag.ingest.index import Index
from kvrag.kvcache import FusedKV
from kvrag.models.caches import FusedCache
from kvrag.models.kv_model import KVModel
from kvrag_bench.memory import peak_bytes, resident_bytes
from kvrag_bench.shapes import random_model, random_text
from kvrag_corpus import generate_corpus


@dataclass(frozen=True)
class EvictionBenchOptions:
    """What to measure.

    Attributes
    ----------
    model, shape
        A model folder or name; None takes random weights of `shape`
        (`kvrag_bench.shapes.SHAPES`).
    num_tokens
        Tokens of the prompt: generated documents for a model, random words for random weights.
    evictions
        Policies.
    num_steps
        Tokens decoded and timed, after one that does not count.
    sharpness
        Factor of the queries of random weights: without it they attend to all keys alike, and a
        policy that uses attention weights finds nothing to forget.
    """

    model: str | None = None
    shape: str = "qwen2.5-0.5b"
    num_tokens: int = 4096
    evictions: Sequence[str] = ("corm",)
    num_steps: int = 32
    sharpness: float = 1.0

    def __post_init__(self) -> None:
        if min(self.num_tokens, self.num_steps) < 1 or not self.evictions:
            raise ParameterError(
                "bench eviction: tokens and steps must be 1 or more, and at least one policy given"
            )
        if not 0.0 < self.sharpness < float("inf"):
            raise ParameterError(f"sharpness {self.sharpness}: expected a number above 0")
        for spec in self.evictions:
            if make_eviction(spec) is None:
                raise ParameterError(
                    "bench eviction: 'none' is what the others are held against; leave it out"
                )


@dataclass(frozen=True)
class EvictionBenchRow:
    """One policy after one prompt.

    Attributes
    ----------
    prompt_share, kept_share
        Share of keys kept after the prompt, and of all keys at the end.
    evict_seconds
        Time to prune the prompt: compute its last queries again and copy the kept rows.
    step_seconds, full_step_seconds, step_ratio
        Median times of one token through the whole model, and their ratio.
    attention_seconds, full_attention_seconds, attention_ratio
        The same for its attention alone, over all layers, policy and cache included.
    size_bytes, full_bytes
        Size that the cache reports after the steps, and size of the full cache's rows.
    resident_bytes, full_resident_bytes, peak_bytes
        Increase of resident memory over no cache: with the pruned cache, with the full one, and
        the most while pruning.
    """

    model: str
    num_tokens: int
    eviction: str
    prompt_share: float
    kept_share: float
    evict_seconds: float
    step_seconds: float
    full_step_seconds: float
    step_ratio: float
    attention_seconds: float
    full_attention_seconds: float
    attention_ratio: float
    size_bytes: int
    full_bytes: int
    resident_bytes: int
    full_resident_bytes: int
    peak_bytes: int


def run_eviction_bench(
    options: EvictionBenchOptions, on_progress: Callable[[str], None] | None = None
) -> list[EvictionBenchRow]:
    """Measure each policy on the same prompt.

    Raises
    ------
    ParameterError, PromptTooLongError, ModelLoadError, UnsupportedModelError
        Before anything is timed.
    """
    say = on_progress or (lambda _: None)
    say("loading the model")
    if options.model:
        model = KVModel.load(options.model)
    else:
        model = _sharpened(random_model(options.shape), options.sharpness)
    policies = [policy for spec in options.evictions if (policy := make_eviction(spec)) is not None]
    with (
        tempfile.TemporaryDirectory(prefix="kvrag-bench-") as folder,
        Index.create(Path(folder) / "index", model=model, embedding="hashing") as index,
    ):
        prompt = _text(model, options.num_tokens, is_random=options.model is None)
        say(f"full prefill of {options.num_tokens} tokens")
        fused = KVEngine(index).fuse(prompt, max_tokens=options.num_steps + 1)
        pruned = []
        for policy in policies:
            say(f"pruning by {policy}")
            pruned.append(_prune(model, fused, policy))
        say(f"{options.num_steps + 1} steps of {len(policies) + 1} caches")
        decoders = [one.decoder for one in pruned]
        attention = [_attention_seconds(model, fused, one, options.num_steps) for one in decoders]
        full_step, steps = _step_seconds(model, fused, decoders, options.num_steps)
        rows = []
        for one, step, (seconds, full_seconds) in zip(pruned, steps, attention, strict=True):
            report = one.decoder.report()
            rows.append(
                EvictionBenchRow(
                    model=model.name,
                    num_tokens=report.num_prompt,
                    eviction=report.policy,
                    prompt_share=report.prompt_share,
                    kept_share=report.kept_share,
                    evict_seconds=one.seconds,
                    step_seconds=step,
                    full_step_seconds=full_step,
                    step_ratio=step / full_step,
                    attention_seconds=seconds,
                    full_attention_seconds=full_seconds,
                    attention_ratio=seconds / full_seconds,
                    size_bytes=report.size_bytes,
                    full_bytes=report.full_bytes,
                    resident_bytes=one.resident_bytes,
                    full_resident_bytes=one.full_resident_bytes,
                    peak_bytes=one.peak_bytes,
                )
            )
    return rows


def _sharpened(model: KVModel, sharpness: float) -> KVModel:
    layers: Any = model.hf.base_model.layers
    with torch.no_grad():
        for layer in layers:
            layer.self_attn.q_proj.weight.mul_(sharpness)
    return model


def _text(model: KVModel, num_tokens: int, *, is_random: bool) -> str:
    if is_random:
        # With the beginning of text that the tokenizer puts before it.
        return random_text(model, num_tokens - 1, seed=0)
    corpus = generate_corpus(0, "test", max(8, num_tokens // 16), 5)
    words = " ".join(p for document in corpus.documents for p in document.paragraphs)
    offsets = model.tokenizer(words, add_special_tokens=False, return_offsets_mapping=True)[
        "offset_mapping"
    ]
    special = len(model.tokenizer("")["input_ids"])
    return words[: offsets[num_tokens - special - 1][1]]


def _copied(model: KVModel, fused: FusedPrompt) -> FusedPrompt:
    """Return the prompt with a separate buffer."""
    kv = fused.kv
    own = FusedKV(model.spec, kv.num_tokens, kv.capacity, model.device, kv.storage.clone())
    return replace(fused, kv=own)


@dataclass(frozen=True)
class _Pruned:
    decoder: EvictingDecoder
    seconds: float
    full_resident_bytes: int
    resident_bytes: int
    peak_bytes: int


def _prune(model: KVModel, fused: FusedPrompt, policy: EvictionPolicy) -> _Pruned:
    before = resident_bytes()
    own = _copied(model, fused)
    full = resident_bytes() - before
    made: list[EvictingDecoder] = []
    started = time.perf_counter()
    rise = peak_bytes(lambda: made.append(EvictingDecoder(model, own, policy)))
    seconds = time.perf_counter() - started
    return _Pruned(made[0], seconds, full, resident_bytes() - before, full + rise)


def _step_seconds(
    model: KVModel, fused: FusedPrompt, decoders: Sequence[EvictingDecoder], num_steps: int
) -> tuple[float, list[float]]:
    token = int(fused.logits.argmax())
    all_decoders: list[Decoder] = [CacheDecoder(model, fused), *decoders]
    seconds: list[list[float]] = [[] for _ in all_decoders]
    for _ in range(num_steps + 1):
        for decoder, times in zip(all_decoders, seconds, strict=True):
            started = time.perf_counter()
            decoder.step(token)
            times.append(time.perf_counter() - started)
    full, *others = [median(times[1:]) for times in seconds]
    return full, others


def _attention_seconds(
    model: KVModel, fused: FusedPrompt, decoder: EvictingDecoder, num_steps: int
) -> tuple[float, float]:
    """Return seconds of one token's attention in all layers: evicting, and over the full cache."""
    spec, config = model.spec, model.hf.config
    cache: EvictingCache = copy.deepcopy(decoder.cache)
    full = FusedCache(fused.kv, fused.kv.num_tokens)
    layers: Any = cache.layers
    base: Any = model.hf.base_model
    modules = [layer.self_attn for layer in base.layers]
    draw = torch.Generator().manual_seed(0)
    shape = (1, config.num_attention_heads, 1, spec.head_dim)
    query = torch.randn(shape, generator=draw).to(model.device, spec.dtype)
    key = torch.randn(1, spec.num_kv_heads, 1, spec.head_dim, generator=draw).to(query)
    score = Score(modules[0].scaling, None)
    evicting, plain = [], []
    with torch.no_grad():
        for _ in range(num_steps):
            started = time.perf_counter()
            for layer in layers:
                layer.step(query, key, key, None, score)
            evicting.append(time.perf_counter() - started)
            started = time.perf_counter()
            for layer_index, module in enumerate(modules):
                keys, values = full.update(key, key, layer_index)
                sdpa_attention_forward(module, query, keys, values, None, scaling=score.scaling)
            plain.append(time.perf_counter() - started)
    return median(evicting), median(plain)
