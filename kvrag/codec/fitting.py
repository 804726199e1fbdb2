"""Fits a profile: bases, steps and probability tables, from chunks of KV.

The transform is fitted to three runs of tokens in four. Its memory grows with the model, not with
the corpus. Steps and tables are fitted to the fourth run, because the basis flatters the tokens
that it was fitted to: in the least important components they look smaller than others. The fourth
runs are held in memory, up to a limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch

from kvrag.codec.base import check_kv
from kvrag.codec.config import PipelineConfig
from kvrag.codec.entropy.tables import (
    NUM_SYMBOLS,
    bits_of,
    cluster,
    count_symbols,
    fit_frequencies,
)
from kvrag.codec.exponents import rest_bits, split
from kvrag.codec.fitted_planes import with_escapes
from kvrag.codec.level_fitting import Sample
from kvrag.codec.profile import Level, Plane, Profile
from kvrag.codec.quantiser import Exact
from kvrag.codec.transform.base import FittedTransform, greatest_tame
from kvrag.codec.transform.pca import Components
from kvrag.errors import ParameterError
from kvrag.kvcache import ChunkKV, KVSpec

MIN_TOKENS = 256
_RUN = 32
_KEPT_OUT = 4  # one run of tokens in four
_MAX_KEPT_NUMBERS = 1 << 24  # the fit needs about 40 times their 4 bytes


def fit_profile(
    config: PipelineConfig,
    spec: KVSpec,
    model_fingerprint: str,
    chunks: Iterable[ChunkKV],
    on_progress: Callable[[str], None] = lambda _: None,
) -> Profile:
    """Fit a codec to a model.

    Parameters
    ----------
    chunks
        Position-free KV of a sample of the corpus. They are iterated once.
    on_progress
        Called with a line of text when a stage begins.

    Raises
    ------
    ParameterError
        If the sample holds fewer than 256 tokens, or NaN or infinity.
    """
    fitter = config.transform.fitter(spec)
    kept: list[ChunkKV] = []
    num_tokens = num_kept = 0
    for chunk in chunks:
        kv = _without_wild_tokens(chunk)
        # Runs alternate, so that even a sample of one chunk has both kinds.
        runs = (num_tokens + torch.arange(kv.num_tokens)) // _RUN
        num_tokens += kv.num_tokens
        for is_kept_out, tokens in ((False, runs % _KEPT_OUT != 1), (True, runs % _KEPT_OUT == 1)):
            part = ChunkKV(kv.keys[:, :, tokens], kv.values[:, :, tokens])
            if part.num_tokens == 0:
                continue
            if not is_kept_out:
                fitter.update(part)
            elif num_kept + part.keys.numel() <= _MAX_KEPT_NUMBERS or not kept:
                kept.append(part)
                num_kept += part.keys.numel()
    if num_tokens < MIN_TOKENS:
        raise ParameterError(
            f"a profile needs {MIN_TOKENS} tokens or more, and many thousands to be good; found "
            f"{num_tokens}: give more documents"
        )
    on_progress("finding the basis")
    transform = fitter.finish()
    if isinstance(config.quantiser, Exact):
        exact = _fit_exponents(config, spec, transform, kept)
        return Profile(config, spec, model_fingerprint, transform, (exact,), num_tokens)
    sample = Sample(config, spec, transform, kept)
    levels = []
    for level, name in enumerate(config.allocation.level_names()):
        on_progress(f"fitting level {name}")
        levels.append(sample.fit_level(level, name))
    if isinstance(transform, Components):
        # Components that no level codes would be most of the file.
        most = [max(len(level.steps[b][0]) for level in levels) for b in range(len(sample.blocks))]
        transform = transform.keep_rows(most)
    return Profile(config, spec, model_fingerprint, transform, tuple(levels), num_tokens)


def _without_wild_tokens(kv: ChunkKV) -> ChunkKV:
    """Return a chunk without the tokens that are kept raw with any profile."""
    check_kv(kv)
    most = torch.maximum(kv.keys.abs().amax((0, 1, 3)), kv.values.abs().amax((0, 1, 3)))
    tokens = most > greatest_tame(kv.keys.dtype)
    if not bool(tokens.any()):
        return kv
    return ChunkKV(kv.keys[:, :, ~tokens], kv.values[:, :, ~tokens])


def _fit_exponents(
    config: PipelineConfig, spec: KVSpec, transform: FittedTransform, kept: list[ChunkKV]
) -> Level:
    """Return the one level of codec ``lossless``: tables of exponents relative to row medians."""
    steps, counts = [], []
    for plan in transform.plans:
        numbers = torch.cat([plan.stack(kv.keys, kv.values) for kv in kept], dim=1)
        exponents, _ = split(numbers)
        typical = numbers.float().abs().median(dim=1).values.clamp(min=2.0**-14, max=2.0**15)
        step = torch.exp2(typical.log2().floor())
        centres, _ = split(step.to(spec.dtype))
        steps.append((step,))
        counts.append(count_symbols(exponents - centres[:, None]))
    rows = np.concatenate(counts)
    classes = cluster(rows, config.coder.classes)
    pooled = np.zeros((int(classes.max()) + 1, NUM_SYMBOLS), dtype=np.int64)
    np.add.at(pooled, classes, rows)
    frequencies = fit_frequencies(pooled)
    cost = with_escapes(bits_of(frequencies))
    plane = Plane(
        frequencies=frequencies,
        num_rows=tuple((len(step),) for (step,) in steps),
        shrink=torch.zeros(len(frequencies)),
        bits=float((pooled * cost).sum() / pooled.sum()) + rest_bits(spec.dtype),
    )
    return Level(
        name=config.allocation.level_names()[0],
        steps=tuple(steps),
        classes=classes.astype(np.uint16),
        planes=(plane,),
        distortion=torch.zeros(len(transform.plans)),
        relative_error=0.0,
    )
