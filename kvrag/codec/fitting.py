"""Fits a profile: bases, steps and probability tables, from chunks of KV.

The transform is fitted to three runs of tokens in four. Its memory grows with the model, not with
the corpus. Steps and tables are fitted to the fourth run, because the basis flatters the tokens
that it was fitted to: in the least important components they look smaller than others. The fourth
runs are held in memory, up to a limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kvrag.codec.base import check_kv
from kvrag.codec.config import PipelineConfig
from kvrag.codec.entropy.tables import (
    ESCAPE,
    NUM_SYMBOLS,
    bits_of,
    cluster,
    count_symbols,
    empirical_bits,
    fit_digit_frequencies,
    fit_frequencies,
)
from kvrag.codec.exponents import rest_bits, split
from kvrag.codec.planes import (
    NUM_CONTEXTS,
    RADIX,
    coarser,
    digit_contexts,
    digit_symbols,
    value_costs,
)
from kvrag.codec.profile import Level, Plane, Profile
from kvrag.codec.quantiser import ESCAPE_BITS, MAX_MAGNITUDE, Exact, quantise, token_scales
from kvrag.codec.transform.base import Analysis, FittedTransform, greatest_tame
from kvrag.codec.transform.pca import Components
from kvrag.errors import ParameterError
from kvrag.kvcache import ChunkKV, KVSpec

# Fits classes and probability tables to whole numbers, plane by plane.


@dataclass(frozen=True)
class SampleMatrix:
    """One matrix of one block over all kept tokens, in units of the tokens' scales."""

    rows: torch.Tensor
    units: torch.Tensor
    layers: torch.Tensor
    is_exact: bool


class FittedPlanes:
    """Classes and tables for whole numbers, plane by plane.

    Attributes
    ----------
    values
        For each plane, from coarse to fine, the numbers ``[R, T]`` of each matrix.
    num_rows
        For each matrix, how many rows are coded in the finest plane.
    classes
        For each matrix, the class of each of those rows.
    frequencies
        The tables of each plane.
    bits
        The size of each plane in bits.
    """

    def __init__(
        self, config: PipelineConfig, matrices: list[SampleMatrix], values: list[torch.Tensor]
    ) -> None:
        self._matrices = matrices
        self.values = [values]
        for _ in range(config.quantiser.refinements):
            finer = zip(matrices, self.values[0], strict=True)
            self.values.insert(0, [v if m.is_exact else coarser(v) for m, v in finer])
        self.num_rows = [_last_used(v) for v in values]
        counts = [count_symbols(v[:n]) for v, n in zip(values, self.num_rows, strict=True)]
        classes = cluster(np.concatenate(counts), config.coder.classes)
        self.num_classes = int(classes.max()) + 1 if len(classes) else 1
        self.classes = np.split(classes, np.cumsum(self.num_rows)[:-1])
        self.frequencies: list[NDArray[np.uint16]] = []
        self.bits: list[float] = []
        for plane in range(len(self.values)):
            self._fit_plane(plane)

    def num_rows_of(self, plane: int, matrix: int) -> int:
        """Return how many rows of a matrix are coded in a plane."""
        if self._matrices[matrix].is_exact:
            return self.num_rows[matrix] if plane == 0 else 0
        return _last_used(self.values[plane][matrix])

    def classes_of(self, matrix: int) -> NDArray[np.int64]:
        """Return int64 ``[R']``: the classes of a matrix's coded rows."""
        return self.classes[matrix].astype(np.int64)

    @property
    def costs(self) -> torch.Tensor:
        """Cost in bits of whole numbers of the finest plane, float32 ``[C, 256]``."""
        return value_costs(self.frequencies[0], self.frequencies[1:], self.num_classes)

    def _fit_plane(self, plane: int) -> None:
        num_contexts = 1 if plane == 0 else NUM_CONTEXTS
        counts = np.zeros((self.num_classes * num_contexts, NUM_SYMBOLS), dtype=np.int64)
        for index, values in enumerate(self.values[plane]):
            n = self.num_rows_of(plane, index)
            classes = torch.from_numpy(self.classes_of(index)[:n])
            if plane == 0:
                np.add.at(counts, classes.numpy(), count_symbols(values[:n]))
            elif n:
                known = self.values[plane - 1][index][:n]
                symbols = digit_symbols(values[:n], known).long()
                which = classes[:, None] * num_contexts + digit_contexts(known).long()
                flat = (which * NUM_SYMBOLS + symbols).flatten()
                counted = torch.bincount(flat, minlength=counts.size).numpy()
                counts += counted.reshape(counts.shape)
        fit = fit_frequencies if plane == 0 else fit_digit_frequencies
        frequencies = fit(counts)
        self.frequencies.append(frequencies)
        self.bits.append(float((counts * with_escapes(bits_of(frequencies))).sum()))


def with_escapes(bits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return `bits` with the cost of an escape for symbols that have no code."""
    bits = np.minimum(bits, ESCAPE_BITS)
    bits[:, ESCAPE] = ESCAPE_BITS
    return bits


def _last_used(values: torch.Tensor) -> int:
    """Return the number of rows up to and including the last one that is not all zeros."""
    used = (values != 0).any(1).nonzero()
    return int(used[-1]) + 1 if len(used) else 0


# Fits the levels of a profile: how fine the steps are, and which rows are worth any bits.


_ROUNDS = 2  # tables depend on the quantiser's choices, and these depend on the tables
_BISECTIONS = 14
_CORRECTIONS = 8
_CLOSE_ENOUGH = 0.015
_LEAST_SPREAD = 0.35


class Sample:
    """The transformed tokens that the transform was not fitted to."""

    def __init__(
        self,
        config: PipelineConfig,
        spec: KVSpec,
        transform: FittedTransform,
        kept: list[ChunkKV],
    ) -> None:
        self._config = config
        self._spec = spec
        num_tokens = sum(kv.num_tokens for kv in kept)
        self._num_elements = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * num_tokens
        self.blocks: list[list[SampleMatrix]] = []
        self._lost: list[float] = []  # a token's squared error without any quantising
        self._energy = 0.0  # a token's squared distance from the mean, in the same metric
        for block, plan in enumerate(transform.plans):
            channels = [plan.gather(kv) for kv in kept]
            analyses = [transform.analyse(block, rows) for rows in channels]
            self.blocks.append(self._matrices(transform, block, analyses))
            self._lost.append(_mean_error(transform, block, channels, analyses))
            every = torch.cat(channels, dim=1)
            middle = every.mean(1, keepdim=True).expand_as(every)
            self._energy += float(transform.errors(block, middle, every).mean())

    def _matrices(
        self, transform: FittedTransform, block: int, analyses: list[Analysis]
    ) -> list[SampleMatrix]:
        found = []
        for index, plan in enumerate(transform.matrices(block)):
            parts = [analysis.matrices[index] for analysis in analyses]
            if self._config.quantiser.scales_tokens and not plan.is_exact:
                parts = [part / token_scales(plan, part).float()[plan.segments] for part in parts]
            rows = torch.cat(parts, dim=1)
            spread = rows.square().mean(1).sqrt()
            units = self._config.quantiser.units(plan, spread)
            found.append(SampleMatrix(rows, units, plan.layers, plan.is_exact))
        return found

    def fit_level(self, level: int, name: str) -> Level:
        """Return the level called `name`, at its target if the allocation has one."""
        target = self._config.allocation.target_bits(level)
        if target is None:
            return self._fit(level, name, 1.0)
        # With finer steps, the greatest numbers would overflow.
        finest = 2.0 * self._greatest() / MAX_MAGNITUDE + 1e-12
        factor = self._find_factor(level, target, finest)
        # Rate-distortion optimised rounding and shared tables move the rate.
        fine, coarse = 0.0, math.inf
        for _ in range(_CORRECTIONS):
            found = self._fit(level, name, factor)
            if abs(found.bits / target - 1.0) < _CLOSE_ENOUGH:
                break
            if found.bits < target and factor <= finest:
                break  # even the finest steps take fewer bits than the target
            if found.bits > target:
                fine = factor
            else:
                coarse = factor
            if fine > 0.0 and coarse < math.inf:
                factor = math.sqrt(fine * coarse)
            else:  # one bit less means about twice the step
                step = 2.0 ** (found.bits - target)
                factor = max(finest, factor * min(max(step, 0.5), 2.0))
        return found

    def _steps(self, level: int, matrix: SampleMatrix, factor: float) -> torch.Tensor:
        if matrix.is_exact:
            return torch.ones(len(matrix.rows))
        relative = self._config.allocation.relative_steps(
            level, matrix.layers, self._spec.num_layers
        )
        return matrix.units * relative * factor

    def _greatest(self) -> float:
        return max(float(m.rows.abs().max()) for b in self.blocks for m in b)

    def _find_factor(self, level: int, target: float, finest: float) -> float:
        """Return the factor at which the rows' empirical entropies add up to the target."""
        low, high = finest, 4.0 * self._greatest() + 1e-9
        for _ in range(_BISECTIONS):
            middle = (low * high) ** 0.5
            bits = 0.0
            for matrix in (m for block in self.blocks for m in block):
                rows = matrix.rows / self._steps(level, matrix, middle)[:, None]
                bits += empirical_bits(count_symbols(quantise(rows)))
            low, high = (middle, high) if bits > target * self._num_elements else (low, middle)
        return math.sqrt(low * high)

    def _fit(self, level: int, name: str, factor: float) -> Level:
        matrices = [m for block in self.blocks for m in block]
        steps = [self._steps(level, m, factor) for m in matrices]
        rows = [m.rows / step[:, None] for m, step in zip(matrices, steps, strict=True)]
        coded = [self._worth_coding(level, m, r) for m, r in zip(matrices, rows, strict=True)]
        values = [quantise(r) for r in coded]
        weight = self._config.quantiser.rate_weight
        fitted = FittedPlanes(self._config, matrices, values)
        for _ in range(_ROUNDS if weight else 0):
            for index, (matrix, n) in enumerate(zip(matrices, fitted.num_rows, strict=True)):
                if not matrix.is_exact:
                    classes = torch.from_numpy(fitted.classes_of(index))
                    values[index][:n] = quantise(coded[index][:n], fitted.costs, classes, weight)
                    values[index][n:] = 0
            fitted = FittedPlanes(self._config, matrices, values)
        planes = self._planes(fitted, rows)
        last = planes[-1]
        distortion, all_steps, index = [], [], 0
        for block, lost in zip(self.blocks, self._lost, strict=True):
            error, of_block = lost, []
            for matrix in block:
                n = fitted.num_rows[index]
                v = fitted.values[-1][index].float()
                v[:n] -= (
                    v[:n].sign() * last.shrink[torch.from_numpy(fitted.classes_of(index)), None]
                )
                if not matrix.is_exact:
                    squares = (v - rows[index]).square() * steps[index][:, None].square()
                    error += float(squares.sum(0).mean())
                of_block.append(steps[index][:n].contiguous())
                index += 1
            distortion.append(error)
            all_steps.append(tuple(of_block))
        return Level(
            name=name,
            steps=tuple(all_steps),
            classes=np.concatenate(fitted.classes).astype(np.uint16),
            planes=planes,
            distortion=torch.tensor(distortion),
            relative_error=sum(distortion) / max(self._energy, 1e-30),
        )

    def _worth_coding(self, level: int, matrix: SampleMatrix, rows: torch.Tensor) -> torch.Tensor:
        """Return rows in units of their step, with zeros for rows that are not worth coding.

        In rows that spread less than a third of a step, few numbers do not round to 0, and those
        cost more bits than they save in distortion. Measured: without such rows, which are half of
        all, the rate falls by 1 to 2 % at equal distortion.
        """
        if matrix.is_exact or self._config.allocation.target_bits(level) is None:
            return rows
        spread = rows.square().mean(1, keepdim=True).sqrt()
        # At very low rates all rows spread less; then the widest are kept.
        return rows * (spread >= min(_LEAST_SPREAD, 0.5 * float(spread.max())))

    def _planes(self, fitted: FittedPlanes, rows: list[torch.Tensor]) -> tuple[Plane, ...]:
        planes, bits = [], 0.0
        for number, values in enumerate(fitted.values):
            bits += fitted.bits[number]
            scale = float(RADIX ** (len(fitted.values) - 1 - number))
            num_rows, index = [], 0
            gaps, hits = np.zeros(fitted.num_classes), np.zeros(fitted.num_classes)
            for block in self.blocks:
                of_block = []
                for matrix in block:
                    n = fitted.num_rows_of(number, index)
                    of_block.append(n)
                    if not matrix.is_exact:
                        used = values[index][:n] != 0
                        gap = values[index][:n].abs() - rows[index][:n].abs() / scale
                        classes = fitted.classes_of(index)[:n]
                        np.add.at(gaps, classes, (gap * used).sum(1).double().numpy())
                        np.add.at(hits, classes, used.sum(1).double().numpy())
                    index += 1
                num_rows.append(tuple(of_block))
            shrink = torch.from_numpy(gaps / np.maximum(hits, 1)).float().clamp(-0.5, 0.5)
            planes.append(
                Plane(
                    frequencies=fitted.frequencies[number],
                    num_rows=tuple(num_rows),
                    shrink=shrink,
                    bits=bits / self._num_elements,
                )
            )
        return tuple(planes)


def _mean_error(
    transform: FittedTransform,
    block: int,
    channels: list[torch.Tensor],
    analyses: list[Analysis],
) -> float:
    """Return a token's mean squared error if rows are not quantised at all."""
    total = 0.0
    for rows, analysis in zip(channels, analyses, strict=True):
        found = transform.synthesise(block, analysis, rows.shape[1])
        total += float(transform.errors(block, found, rows).sum())
    return total / sum(rows.shape[1] for rows in channels)


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
