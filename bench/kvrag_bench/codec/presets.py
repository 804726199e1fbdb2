"""The codecs users can name, on chunks of every length, and their curves against the baselines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from kvrag.codec.base import Codec
from kvrag.codec.config import CodecChoice, PipelineConfig, RateDistortion, choose_codec
from kvrag.codec.fitting import fit_profile
from kvrag.codec.pipeline import PipelineCodec
from kvrag.codec.registry import get_codec
from kvrag_bench.codec.baselines import (
    BIN_FACTORS,
    CACHEGEN_PUBLIC,
    EIGHT_BIT,
    measure_cachegen,
    measure_eight_bit,
)
from kvrag_bench.codec.curves import TARGETS, bits_at
from kvrag_bench.codec.records import Point, bytes_per_token, measure_codec
from kvrag_bench.codec.rows import BASELINE, EQUAL, PRESET, CodecRow
from kvrag_bench.codec.sources import Source

# Profiles are bound to a model by its fingerprint; here they are used and thrown away.
NO_MODEL = "0" * 40
SAME_BINS = f"{CACHEGEN_PUBLIC}-16"


@dataclass
class _Curve:
    """Points of one codec on chunks of one length."""

    preset: str
    num_tokens: int
    points: list[Point]


def preset_rows(
    source: Source, names: Sequence[str], on_progress: Callable[[str], None] = lambda _: None
) -> Iterator[CodecRow]:
    """Yield rows of codecs, of the baselines, and of both at equal distortion."""
    curves: list[_Curve] = []
    for codec, preset, level in _codecs(source, names, on_progress):
        planes: list[int | None] = [None]
        if isinstance(codec, PipelineCodec):
            found = codec.profile.levels[codec.profile.level_index(level)]
            planes = [*range(1, len(found.planes)), None]
        for num_tokens, chunks in source.measured.items():
            on_progress(f"{source.name}: {preset} {level} on chunks of {num_tokens} tokens")
            points = measure_codec(codec, source, chunks, planes)
            for num_planes, point in zip(planes, points, strict=True):
                name = level if num_planes is None else f"{level}/{num_planes}"
                yield _row(PRESET, source, preset, name or None, num_tokens, point)
                if num_planes is None:
                    _add(curves, preset, num_tokens, point)
    for row, point in _baseline_rows(source, on_progress):
        yield row
        assert row.num_tokens is not None
        _add(curves, row.preset, row.num_tokens, point)
    yield from _equal_rows(source, curves)


def _codecs(
    source: Source, names: Sequence[str], on_progress: Callable[[str], None]
) -> Iterator[tuple[Codec, str, str]]:
    """Yield codecs, and their presets and levels; all levels of a preset share one profile."""
    groups: dict[str, list[CodecChoice]] = {}
    for name in dict.fromkeys(names):
        choice = choose_codec(name)
        groups.setdefault(choice.label.partition(":")[0], []).append(choice)
    for preset, choices in groups.items():
        config = choices[0].config
        if config is None:
            yield get_codec(preset), preset, ""
            continue

        def say(line: str, preset: str = preset) -> None:
            on_progress(f"{source.name}: {preset}: {line}")

        config = _with_levels(config, [choice.level for choice in choices])
        profile = fit_profile(config, source.spec, NO_MODEL, source.fit, say)
        for choice in choices:
            level = choice.label.partition(":")[2]
            yield get_codec(choice.label, profile), preset, level


def _with_levels(config: PipelineConfig, levels: Sequence[str]) -> PipelineConfig:
    """Return a configuration that has the levels asked for and no others to wait for."""
    if not isinstance(config.allocation, RateDistortion):
        return config
    bits = tuple(dict.fromkeys(float(level) for level in levels))
    return replace(config, allocation=RateDistortion(bits))


def _baseline_rows(
    source: Source, on_progress: Callable[[str], None]
) -> Iterator[tuple[CodecRow, Point]]:
    for num_tokens, chunks in source.measured.items():
        on_progress(f"{source.name}: baselines on chunks of {num_tokens} tokens")
        for preset, same_bins in ((CACHEGEN_PUBLIC, False), (SAME_BINS, True)):
            for factor in BIN_FACTORS:
                point = measure_cachegen(source, chunks, factor, same_bins=same_bins)
                yield _row(BASELINE, source, preset, f"x{factor:g}", num_tokens, point), point
        point = measure_eight_bit(source, chunks)
        yield _row(BASELINE, source, EIGHT_BIT, None, num_tokens, point), point


def _equal_rows(source: Source, curves: Sequence[_Curve]) -> Iterator[CodecRow]:
    """Yield what each codec takes at equal distortion, and how much more the baselines take."""
    names = (CACHEGEN_PUBLIC, SAME_BINS, EIGHT_BIT)
    for num_tokens in source.measured:
        mine = [curve for curve in curves if curve.num_tokens == num_tokens]
        public = [curve.points for curve in mine if curve.preset in names[:2]]
        eight = next(c.points[0] for c in mine if c.preset == EIGHT_BIT)
        for curve in mine:
            if curve.preset in names:
                continue
            for balanced in (False, True):
                own = eight.balanced_error if balanced else eight.error
                for error in (own, *TARGETS):
                    bits = bits_at(curve.points, error, balanced=balanced)
                    if bits is None:
                        continue
                    # Whichever of the two kinds of bins is better at this error.
                    found = (bits_at(points, error, balanced=balanced) for points in public)
                    others = [bits for bits in found if bits is not None]
                    # Eight bits stay eight where more error is allowed.
                    against = {CACHEGEN_PUBLIC: min(others, default=None), EIGHT_BIT: eight.bits}
                    for baseline, other in against.items():
                        if other is not None:
                            yield CodecRow(
                                part=EQUAL,
                                source=source.name,
                                preset=curve.preset,
                                num_tokens=num_tokens,
                                bits_per_element=bits,
                                relative_error=None if balanced else error,
                                balanced_error=error if balanced else None,
                                baseline=baseline,
                                ratio=other / bits,
                            )


def _add(curves: list[_Curve], preset: str, num_tokens: int, point: Point) -> None:
    for curve in curves:
        if (curve.preset, curve.num_tokens) == (preset, num_tokens):
            curve.points.append(point)
            return
    curves.append(_Curve(preset, num_tokens, [point]))


def _row(
    part: str, source: Source, preset: str, level: str | None, num_tokens: int, point: Point
) -> CodecRow:
    return CodecRow(
        part=part,
        source=source.name,
        preset=preset,
        level=level,
        num_tokens=num_tokens,
        bits_per_element=point.bits,
        bytes_per_token=bytes_per_token(source.spec, point.bits),
        relative_error=point.error,
        balanced_error=point.balanced_error,
        entropy_bits=point.entropy,
    )
