"""The entropy coder alone, against others, all timed in turn within one run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median

from kvrag.codec.config import choose_codec
from kvrag.codec.fitting import fit_profile
from kvrag.native.kernels import instruction_sets
from kvrag_bench.codec.contenders import (
    NATIVE,
    Contender,
    check_contenders,
    constriction_coders,
    native,
    numba_coder,
)
from kvrag_bench.codec.options import CodecBenchOptions
from kvrag_bench.codec.presets import NO_MODEL
from kvrag_bench.codec.rows import CODER, CodecRow
from kvrag_bench.codec.sources import Source
from kvrag_bench.codec.symbols import SymbolMatrix, preset_mix, three_bits

THREE_BITS = "3 bits"
_MIXES = ("transform:1", "transform:0.5")
_THREADS = (1, 2)


def speed_rows(
    options: CodecBenchOptions, source: Source, on_progress: Callable[[str], None] = lambda _: None
) -> Iterator[CodecRow]:
    """Yield a row for each coder, instruction set, number of threads and load.

    Parameters
    ----------
    source
        What the presets are fitted to whose mixes of symbols are coded.
    """
    check_contenders()
    size = (options.symbol_rows, options.symbol_tokens)
    matrix = three_bits(*size)
    loads: dict[str, list[SymbolMatrix]] = {THREE_BITS: [matrix]}
    for name in _MIXES:
        on_progress(f"fitting {name}")
        choice = choose_codec(name)
        assert choice.config is not None
        profile = fit_profile(choice.config, source.spec, NO_MODEL, source.fit)
        level = profile.levels[profile.level_index(choice.level)]
        loads[f"mix of {name}"] = preset_mix(profile, level, *size)
    for name, load in loads.items():
        on_progress(f"timing entropy coders on {name}")
        contenders = [
            native(load, isa, threads) for isa in instruction_sets() for threads in _THREADS
        ]
        if name == THREE_BITS:
            contenders += constriction_coders(matrix)
            contenders += [numba_coder(matrix, lanes) for lanes in (1, 4)]
        entropy = sum(m.entropy for m in load) / sum(m.symbols.size for m in load)
        yield from _timed(name, contenders, entropy, options.repeats)


def _timed(
    load: str, contenders: Sequence[Contender], entropy: float, repeats: int
) -> Iterator[CodecRow]:
    """Yield rows of coders timed in turn, so that a machine that drifts does so for all."""
    encode: list[list[float]] = [[] for _ in contenders]
    decode: list[list[float]] = [[] for _ in contenders]
    for one in contenders:
        one.encode()
        one.decode()
    for _ in range(repeats):
        for index, one in enumerate(contenders):
            encode[index].append(one.num_symbols / _seconds(one.encode))
            decode[index].append(one.num_symbols / _seconds(one.decode))
    # Contenders come from the slowest instruction set to the fastest.
    best = max(i for i, one in enumerate(contenders) if one.name == NATIVE and one.threads == 1)
    for index, one in enumerate(contenders):
        baseline = ratio = None
        rates = zip(decode[best], decode[index], strict=True)
        if one.name != NATIVE:
            baseline, ratio = one.name, median(ours / theirs for ours, theirs in rates)
        elif one.threads > 1:
            # The one before it is the same on one thread.
            alone = zip(decode[index], decode[index - 1], strict=True)
            baseline = "1 thread"
            ratio = median(both / single for both, single in alone)
        yield CodecRow(
            part=CODER,
            source=load,
            preset=one.name,
            level=one.variant,
            bits_per_element=8 * one.num_bytes / one.num_symbols,
            entropy_bits=entropy,
            encode_symbols_per_second=median(encode[index]),
            decode_symbols_per_second=median(decode[index]),
            threads=one.threads,
            baseline=baseline,
            ratio=ratio,
        )


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
