"""All parts of `kvrag bench codec`, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from kvrag_bench.codec.contenders import check_contenders
from kvrag_bench.codec.decoding import context_rows
from kvrag_bench.codec.designs import design_rows
from kvrag_bench.codec.options import TINY, CodecBenchOptions
from kvrag_bench.codec.presets import preset_rows
from kvrag_bench.codec.rows import CodecRow
from kvrag_bench.codec.sources import make_source
from kvrag_bench.codec.speed import speed_rows

# Enough for the shares of symbols in the mixes that coders are timed on.
_MIX_FIT_TOKENS = 6_000


def run_codec_bench(
    options: CodecBenchOptions, on_progress: Callable[[str], None] = lambda _: None
) -> Iterator[CodecRow]:
    """Yield rows as they are measured.

    Raises
    ------
    ParameterError
        Before anything is measured where a package of the extra ``bench`` is missing; later where
        texts are too few or chunks too long for a source.
    ModelLoadError, UnsupportedModelError
        When a source's model is not available.
    """
    if "speed" in options.parts:
        check_contenders()
    for name in options.sources if {"rate", "designs"} & set(options.parts) else ():
        source = make_source(name, options, on_progress)
        if "rate" in options.parts:
            yield from preset_rows(source, options.codecs, on_progress)
        if "designs" in options.parts:
            yield from design_rows(source, on_progress)
    if "speed" in options.parts:
        small = replace(
            options,
            fit_tokens=min(options.fit_tokens, _MIX_FIT_TOKENS),
            test_tokens=1,
            chunk_tokens=options.chunk_tokens[:1],
        )
        yield from speed_rows(options, make_source(TINY, small, on_progress), on_progress)
    if "decode" in options.parts:
        yield from context_rows(options, on_progress)
