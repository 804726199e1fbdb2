"""Fits a profile: from chunks of KV to bases, steps and probability tables.

Three runs of tokens in four teach the transform (its covariance grows with the model, not with the
corpus); the fourth is kept out, so that steps and tables are fitted to numbers the basis has not
seen: numbers that taught it look smaller than others in the components that matter least. What is
kept out is held in memory up to a limit.
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
_MAX_KEPT_NUMBERS = 1 << 24  # the fit needs some 40 times their 4 bytes


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
        Position-free KV of a sample of the corpus; seen once.
    on_progress
        Receives a line whenever a stage begins.

    Raises
    ------
    ParameterError
        When the sample holds fewer than 256 tokens, or NaN or infinity.
    """
    fitter = config.transform.fitter(spec)
    kept: list[ChunkKV] = []
    num_tokens = num_kept = 0
    for chunk in chunks:
        kv = _without_wild_tokens(chunk)
        # Runs of tokens in turn, so that a sample of one chunk has both kinds of them.
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
            f"a profile is fitted on {MIN_TOKENS} tokens or more, and on many thousands to be "
            f"good; found {num_tokens}: give more documents"
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
        # Components that no level codes would make most of the file.
        most = [max(len(level.steps[b][0]) for level in levels) for b in range(len(sample.blocks))]
        transform = transform.keep_rows(most)
    return Profile(config, spec, model_fingerprint, transform, tuple(levels), num_tokens)


def _without_wild_tokens(kv: ChunkKV) -> ChunkKV:
    """Return a chunk without the tokens that are kept raw whatever the profile says."""
    check_kv(kv)
    most = torch.maximum(kv.keys.abs().amax((0, 1, 3)), kv.values.abs().amax((0, 1, 3)))
    tokens = most > greatest_tame(kv.keys.dtype)
    if not bool(tokens.any()):
        return kv
    return ChunkKV(kv.keys[:, :, ~tokens], kv.values[:, :, ~tokens])


def _fit_exponents(
    config: PipelineConfig, spec: KVSpec, transform: FittedTransform, kept: list[ChunkKV]
) -> Level:
    """Return the one level of codec ``lossless``: tables of exponents about each row's median."""
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
