"""Fits a profile: bases, steps and probability tables, from chunks of KV.

The transform is fitted to three runs of tokens in four. Its memory grows with the model, not with
the corpus. Steps and tables are fitted to the fourth run, because the basis flatters the tokens
that it was fitted to: in the least important components they look smaller than others. The fourth
runs are held in memory, up to a limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from kvrag.codec import tables
from kvrag.codec.bands import FittedBands
from kvrag.codec.base import check_kv
from kvrag.codec.config import PipelineConfig
from kvrag.codec.lossless import rest_bits, split
from kvrag.codec.pca import Components
from kvrag.codec.profile import Level, Plane, Profile
from kvrag.codec.transforms import FittedTransform, greatest_tame
from kvrag.errors import ParameterError
from kvrag.kvcache import ChunkKV, KVSpec

# Fits classes and probability tables to whole numbers, plane by plane.


class FittedPlanes:
    """Classes and tables for whole numbers, plane by plane.

    Attributes
    ----------
    values
        For each plane, from coarse to fine, the numbers ``[R, T]`` of each block.
    num_rows
        For each plane, how many rows of each block are coded.
    classes
        For each block, int64: the class of each row that is coded in the finest plane.
    frequencies
        The tables of each plane.
    bits
        The size of each plane in bits.
    """

    def __init__(self, config: PipelineConfig, values: list[torch.Tensor]) -> None:
        self.values = [values]
        for _ in range(config.quantiser.refinements):
            self.values.insert(0, [tables.coarser(of_block) for of_block in self.values[0]])
        self.num_rows = [[_last_used(of_block) for of_block in plane] for plane in self.values]
        coded = self.num_rows[-1]
        counts = [tables.count_symbols(v[:n]) for v, n in zip(values, coded, strict=True)]
        classes = tables.cluster(np.concatenate(counts), config.coder.classes)
        self.num_classes = int(classes.max()) + 1 if len(classes) else 1
        self.classes = np.split(classes, np.cumsum(coded)[:-1])
        self.frequencies: list[NDArray[np.uint16]] = []
        self.bits: list[float] = []
        for plane in range(len(self.values)):
            self._fit_plane(plane)

    @property
    def costs(self) -> torch.Tensor:
        """Cost in bits of whole numbers of the finest plane, float32 ``[C, 256]``."""
        return tables.value_costs(self.frequencies[0], self.frequencies[1:], self.num_classes)

    def _fit_plane(self, plane: int) -> None:
        num_contexts = 1 if plane == 0 else tables.NUM_CONTEXTS
        counts = np.zeros((self.num_classes * num_contexts, tables.NUM_SYMBOLS), dtype=np.int64)
        for block, values in enumerate(self.values[plane]):
            n = self.num_rows[plane][block]
            classes = torch.from_numpy(self.classes[block][:n])
            if plane == 0:
                np.add.at(counts, classes.numpy(), tables.count_symbols(values[:n]))
            elif n:
                known = self.values[plane - 1][block][:n]
                symbols = tables.digit_symbols(values[:n], known).long()
                which = classes[:, None] * num_contexts + tables.digit_contexts(known).long()
                flat = (which * tables.NUM_SYMBOLS + symbols).flatten()
                counted = torch.bincount(flat, minlength=counts.size).numpy()
                counts += counted.reshape(counts.shape)
        fit = tables.fit_frequencies if plane == 0 else tables.fit_digit_frequencies
        frequencies = fit(counts)
        self.frequencies.append(frequencies)
        self.bits.append(float((counts * with_escapes(tables.bits_of(frequencies))).sum()))


def with_escapes(bits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return `bits` with the cost of an escape for symbols that have no code."""
    bits = np.minimum(bits, tables.ESCAPE_BITS)
    bits[:, tables.ESCAPE] = tables.ESCAPE_BITS
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
        self, config: PipelineConfig, spec: KVSpec, transform: FittedTransform, kept: list[ChunkKV]
    ) -> None:
        self._config = config
        self._spec = spec
        num_tokens = sum(kv.num_tokens for kv in kept)
        self._num_elements = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * num_tokens
        self.rows: list[torch.Tensor] = []  # of each block, all tokens
        self._units: list[torch.Tensor] = []
        self._layers: list[torch.Tensor] = []
        self._lost: list[float] = []  # a token's squared error without any quantising
        self._energy = 0.0  # a token's squared distance from the mean, in the same metric
        for block, plan in enumerate(transform.plans):
            every = torch.cat([plan.gather(kv) for kv in kept], dim=1)
            rows = transform.analyse(block, every)
            self.rows.append(rows)
            self._units.append(config.quantiser.units(rows.square().mean(1).sqrt()))
            self._layers.append(transform.row_layers(block))
            found = transform.synthesise(block, rows)
            self._lost.append(float(transform.errors(block, found, every).mean()))
            middle = every.mean(1, keepdim=True).expand_as(every)
            self._energy += float(transform.errors(block, middle, every).mean())

    def fit_level(self, level: int, name: str) -> Level:
        """Return the level called `name`, at its target if the allocation has one."""
        target = self._config.allocation.target_bits(level)
        if target is None:
            return self._fit(level, name, 1.0)
        # With finer steps, the greatest numbers would overflow.
        finest = 2.0 * self._greatest() / tables.MAX_MAGNITUDE + 1e-12
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

    def _steps(self, level: int, block: int, factor: float) -> torch.Tensor:
        relative = self._config.allocation.relative_steps(
            level, self._layers[block], self._spec.num_layers
        )
        return self._units[block] * relative * factor

    def _greatest(self) -> float:
        return max(float(rows.abs().max()) for rows in self.rows)

    def _find_factor(self, level: int, target: float, finest: float) -> float:
        """Return the factor at which the rows' empirical entropies add up to the target."""
        low, high = finest, 4.0 * self._greatest() + 1e-9
        for _ in range(_BISECTIONS):
            middle = (low * high) ** 0.5
            bits = 0.0
            for block, rows in enumerate(self.rows):
                scaled = rows / self._steps(level, block, middle)[:, None]
                bits += tables.empirical_bits(tables.count_symbols(tables.quantise(scaled)))
            low, high = (middle, high) if bits > target * self._num_elements else (low, middle)
        return math.sqrt(low * high)

    def _fit(self, level: int, name: str, factor: float) -> Level:
        steps = [self._steps(level, block, factor) for block in range(len(self.rows))]
        rows = [one / step[:, None] for one, step in zip(self.rows, steps, strict=True)]
        coded = [self._worth_coding(level, one) for one in rows]
        values = [tables.quantise(one) for one in coded]
        weight = self._config.quantiser.rate_weight
        fitted = FittedPlanes(self._config, values)
        for _ in range(_ROUNDS if weight else 0):
            for block, n in enumerate(fitted.num_rows[-1]):
                classes = torch.from_numpy(fitted.classes[block])
                values[block][:n] = tables.quantise(coded[block][:n], fitted.costs, classes, weight)
                values[block][n:] = 0
            fitted = FittedPlanes(self._config, values)
        planes = self._planes(fitted, rows)
        distortion = []
        for block, (n, lost) in enumerate(zip(fitted.num_rows[-1], self._lost, strict=True)):
            v = fitted.values[-1][block].float()
            shrink = planes[-1].shrink[torch.from_numpy(fitted.classes[block])]
            v[:n] -= v[:n].sign() * shrink[:, None]
            squares = (v - rows[block]).square() * steps[block][:, None].square()
            distortion.append(lost + float(squares.sum(0).mean()))
        in_use = zip(steps, fitted.num_rows[-1], strict=True)
        kept = tuple(step[:n].contiguous() for step, n in in_use)
        of_rows = np.concatenate(fitted.classes).astype(np.uint16)
        error = sum(distortion) / max(self._energy, 1e-30)
        return Level(name, kept, of_rows, planes, torch.tensor(distortion), error)

    def _worth_coding(self, level: int, rows: torch.Tensor) -> torch.Tensor:
        """Return rows in units of their step, with zeros for rows that are not worth coding.

        In rows that spread less than a third of a step, few numbers do not round to 0, and those
        cost more bits than they save in distortion. Measured: without such rows, which are half of
        all, the rate falls by 1 to 2 % at equal distortion.
        """
        if self._config.allocation.target_bits(level) is None:
            return rows
        spread = rows.square().mean(1, keepdim=True).sqrt()
        # At very low rates all rows spread less; then the widest are kept.
        return rows * (spread >= min(_LEAST_SPREAD, 0.5 * float(spread.max())))

    def _planes(self, fitted: FittedPlanes, rows: list[torch.Tensor]) -> tuple[Plane, ...]:
        planes, bits = [], 0.0
        for number, values in enumerate(fitted.values):
            bits += fitted.bits[number]
            scale = float(tables.RADIX ** (len(fitted.values) - 1 - number))
            gaps, hits = np.zeros(fitted.num_classes), np.zeros(fitted.num_classes)
            for block, n in enumerate(fitted.num_rows[number]):
                used = values[block][:n] != 0
                gap = values[block][:n].abs() - rows[block][:n].abs() / scale
                classes = fitted.classes[block][:n]
                np.add.at(gaps, classes, (gap * used).sum(1).double().numpy())
                np.add.at(hits, classes, used.sum(1).double().numpy())
            shrink = torch.from_numpy(gaps / np.maximum(hits, 1)).float().clamp(-0.5, 0.5)
            frequencies, rows_of = fitted.frequencies[number], tuple(fitted.num_rows[number])
            planes.append(Plane(frequencies, rows_of, shrink, bits / self._num_elements))
        return tuple(planes)


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
    if isinstance(config.quantiser, tables.Exact):
        exact = _fit_exponents(config, spec, transform, kept)
        return Profile(config, spec, model_fingerprint, transform, (exact,), num_tokens)
    if isinstance(transform, FittedBands):
        packed = _fit_bands(config, transform, kept)
        return Profile(config, spec, model_fingerprint, transform, (packed,), num_tokens)
    sample = Sample(config, spec, transform, kept)
    levels = []
    for level, name in enumerate(config.allocation.level_names()):
        on_progress(f"fitting level {name}")
        levels.append(sample.fit_level(level, name))
    if isinstance(transform, Components):
        # Components that no level codes would be most of the file.
        most = [max(len(level.steps[b]) for level in levels) for b in range(len(sample.rows))]
        transform = transform.keep_rows(most)
    return Profile(config, spec, model_fingerprint, transform, tuple(levels), num_tokens)


def _fit_bands(config: PipelineConfig, transform: FittedBands, kept: list[ChunkKV]) -> Level:
    """Return the one level of codec ``packed``: no tables, but how far records are from KV."""
    distortion, energy = [], 0.0
    for block, plan in enumerate(transform.plans):
        every = torch.cat([plan.gather(kv) for kv in kept], dim=1)
        rows = np.empty((every.shape[1], transform.prepared(block).row_bytes), np.uint8)
        distortion.append(float(transform.pack(block, every, rows).mean()))
        energy += float((every - every.mean(1, keepdim=True)).square().sum(0).mean())
    if not np.isfinite(distortion).all():
        raise ParameterError(
            "packed: the KV that was kept to judge the fit is far larger than the KV it was fitted "
            "to; fit it to other text"
        )
    nothing = np.full((1, tables.NUM_SYMBOLS), tables.TOTAL // tables.NUM_SYMBOLS, np.uint16)
    num_blocks = len(transform.plans)
    row_bits = sum(8 * transform.prepared(block).row_bytes for block in range(num_blocks))
    num_channels = sum(len(mean) for mean in transform.means)
    plane = Plane(nothing, (0,) * num_blocks, torch.zeros(1), row_bits / num_channels)
    name, steps = config.allocation.level_names()[0], (torch.empty(0),) * num_blocks
    error = sum(distortion) / max(energy, 1e-30)
    return Level(name, steps, np.empty(0, np.uint16), (plane,), torch.tensor(distortion), error)


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
        steps.append(step)
        counts.append(tables.count_symbols(exponents - centres[:, None]))
    rows = np.concatenate(counts)
    classes = tables.cluster(rows, config.coder.classes)
    pooled = np.zeros((int(classes.max()) + 1, tables.NUM_SYMBOLS), dtype=np.int64)
    np.add.at(pooled, classes, rows)
    frequencies = tables.fit_frequencies(pooled)
    cost = with_escapes(tables.bits_of(frequencies))
    bits = float((pooled * cost).sum() / pooled.sum()) + rest_bits(spec.dtype)
    rows_of, shrink = tuple(map(len, steps)), torch.zeros(len(frequencies))
    plane, name = Plane(frequencies, rows_of, shrink, bits), config.allocation.level_names()[0]
    nothing = torch.zeros(len(transform.plans))
    return Level(name, tuple(steps), classes.astype(np.uint16), (plane,), nothing, 0.0)
