"""The codec with its stages exchanged, at equal distortion: what earns its place and what not."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvrag.codec.config import LayerGroups, PipelineConfig, Transform
from kvrag.codec.fitting import fit_profile
from kvrag.codec.pca import PCA
from kvrag.codec.pipeline import PipelineCodec
from kvrag.codec.tables import Uniform
from kvrag.codec.transforms import NoTransform
from kvrag_bench.codec.curves import TARGETS, bits_at
from kvrag_bench.codec.presets import NO_MODEL
from kvrag_bench.codec.records import bytes_per_token, measure_codec
from kvrag_bench.codec.rows import DESIGN, CodecRow
from kvrag_bench.codec.sources import Source

REFERENCE = "pca, all layers"
"""What the other designs are compared with: keys and values in one basis, one plane."""

_GROUPS = (1, 2, 4, 8)
# Steps in units of the channels' root mean square: wide enough for errors of 0.005 to 0.05.
# Components need coarser ones, since most of them round to zero and so lose less.
_STEPS = {"channels": (0.2, 0.42, 0.9), "components": (0.3, 0.75, 1.6, 2.7, 4.5)}


def designs(num_layers: int) -> dict[str, tuple[Transform, int]]:
    """Return transforms and numbers of refinements by what tables call them."""
    found: dict[str, tuple[Transform, int]] = {"none": (NoTransform(), 0)}
    for size in _GROUPS:
        if size < num_layers:
            name = "pca, each layer" if size == 1 else f"pca, {size} layers"
            found[f"{name}, K and V apart"] = (PCA(size, joint=False), 0)
            found[name] = (PCA(size), 0)
    found[f"{REFERENCE}, K and V apart"] = (PCA(joint=False), 0)
    found[REFERENCE] = (PCA(), 0)
    found[f"{REFERENCE}, normalised"] = (PCA(normalise=True), 0)
    found[f"{REFERENCE}, 3 planes"] = (PCA(), 2)
    return found


def design_rows(
    source: Source, on_progress: Callable[[str], None] = lambda _: None
) -> Iterator[CodecRow]:
    """Yield each design's rate at each target that it reaches, on chunks of the middle length.

    Steps are given here rather than found from a rate, so that all designs are quantised alike
    and no row is left out for the rate's sake: figures are for comparing designs.
    """
    lengths = sorted(source.measured)
    num_tokens = lengths[len(lengths) // 2]
    chunks = source.measured[num_tokens]
    spread = source.channel_variance**0.5
    found: dict[str, dict[float, float]] = {}
    for name, (transform, refinements) in designs(source.spec.num_layers).items():
        on_progress(f"{source.name}: {name}")
        kind = "components" if isinstance(transform, PCA) else "channels"
        # Normalised channels have a root mean square of one.
        unit = 1.0 if isinstance(transform, PCA) and transform.normalise else spread
        steps = tuple(step * unit for step in _STEPS[kind])
        config = PipelineConfig(
            transform, LayerGroups((1.0,), steps), Uniform(refinements=refinements)
        )
        profile = fit_profile(config, source.spec, NO_MODEL, source.fit)
        points = [
            measure_codec(PipelineCodec(profile, name, level.name), source, chunks)[0]
            for level in profile.levels
        ]
        found[name] = {}
        for target in TARGETS:
            bits = bits_at(points, target)
            if bits is not None:
                found[name][target] = bits
    for name, by_target in found.items():
        for target, bits in by_target.items():
            reference = found[REFERENCE].get(target)
            yield CodecRow(
                part=DESIGN,
                source=source.name,
                preset=name,
                num_tokens=num_tokens,
                bits_per_element=bits,
                bytes_per_token=bytes_per_token(source.spec, bits),
                relative_error=target,
                baseline=REFERENCE,
                ratio=None if reference is None else reference / bits,
            )
