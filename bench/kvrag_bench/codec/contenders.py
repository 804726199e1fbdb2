"""Entropy coders that take part in the contest, each ready to encode and decode one load."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvrag.codec.block import count_streams
from kvrag.errors import ParameterError
from kvrag.native.entropy import DecodeJob, decode_many, encode_rows
from kvrag.native.kernels import instruction_set, use_instruction_set
from kvrag_bench.codec.numba_coder import NumbaCoder
from kvrag_bench.codec.symbols import SymbolMatrix

NATIVE = "kvrag"
# What is decoded at once, as a prompt's chunks are: 2,500 tokens of 6,144 channels. A few million
# symbols are over before a second thread is at work.
_LEAST_SYMBOLS = 15_360_000


@dataclass(frozen=True)
class Contender:
    """An entropy coder and a load of symbols.

    Attributes
    ----------
    name, variant
        Which coder, and which of its kinds.
    threads
        Threads it may use.
    encode, decode
        What is timed.
    num_symbols, num_bytes
        Symbols of the load, and what they take.
    """

    name: str
    variant: str
    threads: int
    encode: Callable[[], object]
    decode: Callable[[], object]
    num_symbols: int
    num_bytes: int


def native(load: list[SymbolMatrix], isa: str, threads: int) -> Contender:
    """Return kvrag's coder with one instruction set; checks that it decodes the load exactly."""
    payloads = [
        encode_rows(
            m.model,
            m.symbols,
            m.classes,
            num_streams=count_streams(*m.symbols.shape),
            context=m.context,
        )
        for m in load
    ]
    num_symbols = sum(m.symbols.size for m in load)
    copies = -(-_LEAST_SYMBOLS // num_symbols)
    jobs = [
        DecodeJob(m.model, payload, m.classes, np.zeros_like(m.symbols), m.context)
        for _ in range(copies)
        for m, payload in zip(load, payloads, strict=True)
    ]

    def encode() -> None:
        for m in load * copies:
            encode_rows(
                m.model,
                m.symbols,
                m.classes,
                num_streams=count_streams(*m.symbols.shape),
                context=m.context,
                threads=threads,
            )

    def on_isa(work: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            before = instruction_set()
            use_instruction_set(isa)
            try:
                work()
            finally:
                use_instruction_set(before)

        return run

    decode = on_isa(lambda: decode_many(jobs, threads=threads))
    decode()
    for m, job in zip(load * copies, jobs, strict=True):
        assert np.array_equal(m.symbols, job.out)
    return Contender(
        name=NATIVE,
        variant=isa,
        threads=threads,
        encode=on_isa(encode),
        decode=decode,
        num_symbols=copies * num_symbols,
        num_bytes=copies * sum(len(payload) for payload in payloads),
    )


def constriction_coders(matrix: SymbolMatrix) -> list[Contender]:
    """Return constriction's two coders, each decoding the whole load in one call."""
    stream: Any = _imported("constriction").stream
    used = np.flatnonzero(matrix.model.frequencies[0])
    # Its alphabets begin at 0 and leave no symbol out.
    first, last = int(used[0]), int(used[-1])
    shares = matrix.model.frequencies[0, first : last + 1].astype(np.float32)
    model = stream.model.Categorical(shares / shares.sum(), perfect=False)
    symbols = matrix.symbols.ravel().astype(np.int32) - first

    def ans() -> Any:
        coder = stream.stack.AnsCoder()
        coder.encode_reverse(symbols, model)
        return coder.get_compressed()

    def ranges() -> Any:
        coder = stream.queue.RangeEncoder()
        coder.encode(symbols, model)
        return coder.get_compressed()

    found = []
    for variant, encode, decoder in (
        ("ans", ans, stream.stack.AnsCoder),
        ("range", ranges, stream.queue.RangeDecoder),
    ):
        words = encode()

        def decode(decoder: Any = decoder, words: Any = words) -> Any:
            return decoder(words).decode(model, len(symbols))

        assert np.array_equal(decode(), symbols)
        found.append(
            Contender("constriction", variant, 1, encode, decode, len(symbols), 4 * len(words))
        )
    return found


def numba_coder(matrix: SymbolMatrix, lanes: int) -> Contender:
    """Return a table coder compiled by numba, of 1 state or of 4 in turn."""
    _imported("numba")
    coder = NumbaCoder(matrix.model.frequencies[0], lanes)
    symbols = matrix.symbols.ravel()
    symbols = symbols[: len(symbols) - len(symbols) % 4]
    coded = coder.encode(symbols)
    out = np.zeros_like(symbols)
    coder.decode(coded, out)
    assert np.array_equal(out, symbols)
    return Contender(
        name="numba",
        variant="rans" if lanes == 1 else f"rans, {lanes} states",
        threads=1,
        encode=lambda: coder.encode(symbols),
        decode=lambda: coder.decode(coded, out),
        num_symbols=len(symbols),
        num_bytes=coded[0].nbytes + coded[1].nbytes,
    )


def check_contenders() -> None:
    """Raise ParameterError unless the coders of other projects are installed."""
    for name in ("constriction", "numba"):
        _imported(name)


def _imported(name: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ParameterError(
            f"part 'speed' needs {error.name}: pip install 'kvrag[bench]', or leave the part out "
            "with --parts"
        ) from error
