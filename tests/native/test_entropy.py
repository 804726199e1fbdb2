"""The coder against its reference, its golden payloads, and itself."""

import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrag.errors import ParameterError
from kvrag.native.entropy import (
    DecodeJob,
    RansModel,
    decode_many,
    decode_rows,
    encode_rows,
    ideal_bits,
)
from kvrag.native.kernels import instruction_sets, use_instruction_set
from tests.native import reference_rans
from tests.native.cases import Case, make_case
from tests.support.instructions import kept_instruction_set
from tests.support.properties import examples, in_turn

GOLDEN = sorted((Path(__file__).parent / "golden").glob("rans-*.npz"))


def round_trip(case: Case, num_streams: int = 1, threads: int = 1) -> bytes:
    """Return the payload, decoded and compared."""
    model = RansModel(case.frequencies)
    payload = encode_rows(
        model, case.symbols, case.classes, num_streams, context=case.context, threads=threads
    )
    found = np.full_like(case.symbols, 99)
    decode_rows(model, payload, case.classes, found, context=case.context, threads=threads)
    assert (found == case.symbols).all()
    return payload


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_golden_payloads(path: Path, isa: str) -> None:
    golden = np.load(path)
    context = golden.get("context")
    case = Case(golden["frequencies"], golden["symbols"], golden["classes"], context)
    assert round_trip(case, int(golden["num_streams"])) == golden["payload"].tobytes()


def test_there_are_golden_payloads() -> None:
    assert len(GOLDEN) == 4


@pytest.mark.parametrize(("num_tokens", "with_context"), in_turn([1, 31, 32, 33, 96, 500]))
def test_matches_the_reference(num_tokens: int, with_context: bool, isa: str) -> None:
    case = make_case(num_tokens, 9, num_tokens, with_context=with_context)
    payload = round_trip(case, 2)
    expected = reference_rans.encode(case.frequencies, case.symbols, case.classes, 2, case.context)
    assert payload == expected


@settings(max_examples=examples(60))
@given(
    seed=st.integers(0, 1 << 20),
    num_rows=st.integers(0, 20),
    num_tokens=st.one_of(st.integers(0, 70), st.just(500)),
    num_symbols=st.sampled_from([1, 2, 3, 17, 256]),
    num_streams=st.integers(1, 5),
    with_context=st.booleans(),
)
def test_round_trips(
    seed: int,
    num_rows: int,
    num_tokens: int,
    num_symbols: int,
    num_streams: int,
    with_context: bool,
) -> None:
    case = make_case(seed, num_rows, num_tokens, num_symbols=num_symbols, with_context=with_context)
    payloads = set()
    with kept_instruction_set():
        for name in instruction_sets():
            use_instruction_set(name)
            payloads.add(round_trip(case, min(num_streams, max(num_rows, 1))))
    assert len(payloads) == 1


@pytest.mark.parametrize("spread", [0.3, 0.8, 2.0, 4.0, 7.0, 12.0, 20.0, 60.0])
def test_bells(spread: float, isa: str) -> None:
    """Alphabets of 3 to 256 symbols, for which instruction sets have tables of different kinds."""
    rng = np.random.default_rng(3)
    weights = np.exp(-(((np.arange(256) - 128) / spread) ** 2) / 2)
    shares = np.where(weights > 1e-5, np.maximum(1, weights / weights.sum() * 4096), 0).astype(int)
    shares[128] += 4096 - shares.sum()
    # Out of order, several narrow symbols lie side by side in the middle.
    tables = [shares, np.roll(shares, 40), *(rng.permutation(shares) for _ in range(6))]
    frequencies = np.stack(tables).astype(np.uint16)
    classes = (np.arange(41) // 2 % len(tables)).astype(np.uint16)
    slots = np.stack([np.repeat(np.arange(256), row) for row in frequencies])
    for num_tokens in (500, 576, 40):
        drawn = rng.integers(0, 4096, (len(classes), num_tokens))
        symbols = slots[classes[:, None], drawn].astype(np.uint8)
        case = Case(frequencies, symbols, classes)
        payloads = [round_trip(case, num_streams) for num_streams in (1, 2, 3, 4, 6)]
        if num_tokens == 40:
            assert payloads[1] == reference_rans.encode(frequencies, symbols, classes, 2, None)


@pytest.mark.parametrize(
    ("most", "num_symbols"), [(0, 2), (2, 3), (7, 4), (8, 2), (8, 4), (7, 2), (0, 4)]
)
def test_few_symbols_with_contexts(most: int, num_symbols: int, isa: str) -> None:
    rng = np.random.default_rng(most)
    frequencies = np.zeros((5 + most, 256), np.uint16)
    frequencies[:, 127 : 127 + num_symbols] = rng.integers(1, 1000, (5 + most, num_symbols))
    frequencies[:, 127] += 4096 - frequencies.sum(axis=1, dtype=np.int64).astype(np.uint16)
    classes = rng.integers(0, 5, 30).astype(np.uint16)
    context = rng.integers(0, most + 1, (30, 100)).astype(np.uint8)
    context[0, 0] = most
    slots = np.stack([np.repeat(np.arange(256), row) for row in frequencies])
    drawn = rng.integers(0, 4096, context.shape)
    symbols = slots[classes[:, None] + context, drawn].astype(np.uint8)
    case = Case(frequencies, symbols, classes, context)
    assert len({round_trip(case, 4), round_trip(case, 4, threads=2)}) == 1
    expected = reference_rans.encode(frequencies, symbols, classes, 2, context)
    assert round_trip(case, 2) == expected


def test_threads_change_nothing(isa: str) -> None:
    case = make_case(5, 300, 500, num_classes=20)
    alone = round_trip(case, 7)
    assert round_trip(case, 7, threads=3) == alone
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(lambda _: round_trip(case, 7, threads=2), range(16))) == {alone}


def test_several_payloads_at_once(isa: str) -> None:
    cases = [make_case(seed, 5 * seed, 200, with_context=seed % 2 == 0) for seed in range(1, 7)]
    jobs = []
    for case in cases:
        model = RansModel(case.frequencies)
        payload = encode_rows(model, case.symbols, case.classes, 2, context=case.context)
        out = torch.zeros(case.symbols.shape, dtype=torch.uint8)
        jobs.append(DecodeJob(model, memoryview(payload), case.classes, out, case.context))
    decode_many(jobs, threads=2)
    for case, job in zip(cases, jobs, strict=True):
        assert (np.asarray(job.out) == case.symbols).all()
    decode_many([])


def test_rows_may_lie_apart(isa: str) -> None:
    """Strided rows, and a payload at an odd address, with guards that must stay."""
    case = make_case(6, 13, 77)
    model = RansModel(case.frequencies)
    wide = np.zeros((13, 200), np.uint8)
    wide[:, 50:127] = case.symbols
    payload = b"\xff" + encode_rows(model, wide[:, 50:127], case.classes)
    assert payload[1:] == encode_rows(model, case.symbols, case.classes)
    out = np.full((26, 200), 7, np.uint8)
    decode_rows(model, memoryview(payload)[1:], case.classes, out[::2, 50:127])
    assert (out[::2, 50:127] == case.symbols).all()
    assert (out[1::2] == 7).all()
    assert (out[:, :50] == 7).all()
    assert (out[:, 127:] == 7).all()
    upside_down = np.zeros_like(case.symbols)
    decode_rows(model, payload[1:], case.classes, upside_down[::-1])
    assert (upside_down[::-1] == case.symbols).all()


def test_code_length() -> None:
    case = make_case(7, 400, 300, with_context=True)
    model = RansModel(case.frequencies)
    table_of = case.classes[:, None] + case.context
    expected = (12 - np.log2(case.frequencies[table_of, case.symbols])).sum()
    bits = ideal_bits(model, case.symbols, case.classes, context=case.context)
    assert bits == pytest.approx(expected)
    payload = encode_rows(model, case.symbols, case.classes, context=case.context)
    assert 0 <= len(payload) * 8 - bits - 8 * 136 + 32 * 16 < 0.01 * bits + 32 * 16
    never = np.flatnonzero(case.frequencies[0] == 0)[:1].astype(np.uint8)[None]
    assert ideal_bits(model, never, np.zeros(1, np.uint16)) == math.inf


def test_symbols_that_cannot_be_coded_are_named(isa: str) -> None:
    frequencies = np.zeros((2, 256), np.uint16)
    frequencies[:, 3], frequencies[:, 4] = 4000, 96
    symbols = np.full((6, 70), 3, np.uint8)
    symbols[4, 66] = 200
    with pytest.raises(ParameterError, match=r"row 4, token 66: .* class 1, found 200"):
        encode_rows(RansModel(frequencies), symbols, np.ones(6, np.uint16), 3)
    symbols[2, 1] = 5
    with pytest.raises(ParameterError, match=r"row 2, token 1: .* class 0, found 5"):
        encode_rows(RansModel(frequencies), symbols, np.zeros(6, np.uint16))


def test_mistakes_of_the_caller() -> None:
    case = make_case(8, 4, 40)
    model = RansModel(case.frequencies)
    with pytest.raises(ParameterError, match="class 1: expected a sum of 4096, found 4095"):
        RansModel(np.array([[4096, 0], [4000, 95]], np.uint16))
    with pytest.raises(ParameterError, match="uint16"):
        RansModel(case.frequencies.astype(np.int32))
    with pytest.raises(ParameterError, match="1 to 256 symbols"):
        RansModel(np.full((1, 257), 16, np.uint16))
    with pytest.raises(ParameterError, match="row 2: expected 0 to 4, contexts added, found 5"):
        encode_rows(model, case.symbols, np.array([0, 1, 5, 4], np.uint16))
    context = np.full_like(case.symbols, 5)
    with pytest.raises(ParameterError, match="row 0"):
        encode_rows(model, case.symbols, case.classes * 0, context=context)
    with pytest.raises(ParameterError, match=r"classes: expected shape \[4\], found \[3\]"):
        encode_rows(model, case.symbols, case.classes[:3])
    with pytest.raises(ParameterError, match="num_streams: expected 1 to 4"):
        encode_rows(model, case.symbols, case.classes, 5)
    with pytest.raises(ParameterError, match="threads"):
        encode_rows(model, case.symbols, case.classes, threads=0)
    with pytest.raises(ParameterError, match="contiguous last axis"):
        encode_rows(model, case.symbols[:, ::2], case.classes)
    payload = encode_rows(model, case.symbols, case.classes)
    read_only = np.zeros_like(case.symbols)
    read_only.flags.writeable = False
    with pytest.raises(ParameterError, match="writable"):
        decode_rows(model, payload, case.classes, read_only)
    with pytest.raises(ParameterError, match="out: expected uint8"):
        decode_rows(model, payload, case.classes, case.symbols.astype(np.int16))
    with pytest.raises(ParameterError, match="numpy array or a torch tensor"):
        decode_rows(model, payload, case.classes, [[1]])  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="contiguous buffer"):
        decode_rows(model, 5, case.classes, case.symbols)


@pytest.mark.slow
def test_the_environment_chooses_the_instruction_set() -> None:
    # It is read when the package is imported: each in a child that has torch already.
    code = """
import os, sys, torch
for name in sys.argv[1:]:
    if not os.fork():
        os.environ["KVRAG_ISA"] = name
        import kvrag.native.kernels
        print(kvrag.native.kernels.instruction_set(), flush=True)
        os._exit(0)
    os.wait()
"""
    done = subprocess.run(
        [sys.executable, "-c", code, *instruction_sets()],
        capture_output=True,
        text=True,
        check=True,
    )
    assert tuple(done.stdout.split()) == instruction_sets()
    done = subprocess.run(
        [sys.executable, "-c", "import kvrag.native.kernels"],
        env={**os.environ, "KVRAG_ISA": "mmx"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "KVRAG_ISA: instruction set: expected one of scalar" in done.stderr
