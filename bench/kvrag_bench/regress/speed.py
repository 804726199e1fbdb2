"""Ratios of speed, each of two ways that are timed in turn: only the ratio means anything."""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from kvrag.codec.config import choose_codec
from kvrag.codec.fitting import fit_profile
from kvrag.codec.registry import get_codec
from kvrag.engine.engine import KVEngine
from kvrag.fusion.policies import DEFAULT_POLICY
from kvrag.models.kv_model import KVModel
from kvrag.models.loading import load_tokenizer
from kvrag.models.references import resolve_model
from kvrag.models.tokens import encode
from kvrag_bench.codec.decoding import (
    decode_context,
    plain_prefill,
    prepare_context,
    random_chunk,
)
from kvrag_bench.codec.options import CodecBenchOptions
from kvrag_bench.codec.presets import NO_MODEL
from kvrag_bench.codec.records import KEY
from kvrag_bench.decode import decode_seconds
from kvrag_bench.recognition.lookup import measure_lookup
from kvrag_bench.regress.quality import CODEC
from kvrag_bench.regress.results import SPEED, Entry
from kvrag_bench.setting import require_one_thread, temporary_index
from kvrag_bench.shapes import random_model, random_text

_QUESTION_TOKENS = 30
_LOOKUP_TOKENS = 5000
_STARTS = 3  # in each round, since one takes a fraction of a second

Say = Callable[[str], None]


@dataclass(frozen=True)
class SpeedOptions:
    """What is timed. Tests measure less; results of a release have these values.

    Attributes
    ----------
    shape
        Random weights of this shape (`kvrag_bench.shapes.SHAPES`).
    num_chunks, chunk_tokens
        The prompt.
    num_lookup_chunks
        Chunks that a prompt is looked up among.
    answer_tokens
        Tokens of the answer.
    rounds
        Timings of each ratio; one more runs first and does not count.
    """

    shape: str = "smollm2-135m"
    num_chunks: int = 8
    chunk_tokens: int = 250
    num_lookup_chunks: int = 10_000
    answer_tokens: int = 32
    rounds: int = 6


def speed_entries(options: SpeedOptions, say: Say) -> Iterator[Entry]:
    """Yield ratios of processor time, each measured `rounds` times.

    Raises
    ------
    ParameterError
        If this process computes with several threads, or there is no such shape.
    """
    require_one_thread("regress")
    model = random_model(options.shape)
    texts = [random_text(model, options.chunk_tokens, seed) for seed in range(options.num_chunks)]
    prompt = "\n\n".join([*texts, random_text(model, _QUESTION_TOKENS, options.num_chunks)])
    say(f"indexing {len(texts)} chunks of {options.chunk_tokens} tokens")
    with temporary_index(model, texts, options.chunk_tokens) as index:
        # No threads that load: waiting for another one is no work.
        engine = KVEngine(index, session_bytes=0, load_threads=0)
        yield from _in_turn(
            lambda: engine.plain_ttft_seconds(prompt),
            {
                "prefill": lambda: engine.generate(prompt, reuse=False, max_tokens=1),
                "fused, none": lambda: engine.generate(prompt, policy="none", max_tokens=1),
                f"fused, {DEFAULT_POLICY}": lambda: engine.generate(
                    prompt, policy=DEFAULT_POLICY, max_tokens=1
                ),
            },
            options.rounds,
            say,
        )
        say(f"{options.answer_tokens} tokens of an answer, {options.rounds + 1} times")
        runs = decode_seconds(
            engine, prompt, options.answer_tokens, options.rounds, time.process_time
        )
        yield _entry("writing an answer", "of generate's time", runs)
        yield from _codec_entries(model, options, say)
        yield from _start_entries(index.path, options.rounds, say)
    yield _lookup_entry(options, say)


def _codec_entries(model: KVModel, options: SpeedOptions, say: Say) -> Iterator[Entry]:
    context = prepare_context(
        model,
        CodecBenchOptions(
            context_chunks=max(1, options.num_chunks // 2), context_tokens=options.chunk_tokens
        ),
        say,
    )
    fit = [
        kv for seed in range(4) for kv in random_chunk(model, options.chunk_tokens, 10**4 + seed)
    ]
    choice = choose_codec(CODEC)
    assert choice.config is not None
    codec = get_codec(
        choice.label, fit_profile(choice.config, model.chunk_spec, NO_MODEL, fit, say)
    )
    records = [codec.encode(KEY, kv) for kv in context.chunks]
    yield from _in_turn(
        lambda: plain_prefill(model, context.fused.num_tokens),
        {
            f"encoding, {CODEC}": lambda: [codec.encode(KEY, kv) for kv in context.chunks],
            f"decoding, {CODEC}": lambda: decode_context(context, codec, records),
        },
        options.rounds,
        say,
    )


def _start_entries(index: Path, rounds: int, say: Say) -> Iterator[Entry]:
    say("start-up")
    bare = [sys.executable, "-c", "pass"]
    kvrag = [sys.executable, "-m", "kvrag"]
    commands = {
        "start-up, kvrag --help": [*kvrag, "--help"],
        "start-up, kvrag ls": [*kvrag, "ls", "--index", str(index)],
    }
    for name, command in commands.items():
        runs = [(_child_seconds(bare), _child_seconds(command)) for _ in range(rounds + 1)]
        yield _entry(name, "of bare Python's time", runs[1:])


def _lookup_entry(options: SpeedOptions, say: Say) -> Entry:
    tokenizer = load_tokenizer(resolve_model("kvrag-tiny"))
    text = "The keeper of the harbour writes down every boat. " * (_LOOKUP_TOKENS // 10)
    runs = []
    for number in range(options.rounds + 1):
        say(f"look-up, round {number + 1} of {options.rounds + 1}")
        row = measure_lookup(options.num_lookup_chunks, 256, _LOOKUP_TOKENS, lambda _: None)
        tokenizing = median(
            _seconds(lambda: encode(tokenizer, [text], add_special_tokens=False)) for _ in range(50)
        )
        runs.append((tokenizing, row.table_seconds + row.compare_seconds))
    return _entry("look-up of a prompt", "of its tokenizing's time", runs[1:])


def _in_turn(
    plain: Callable[[], object], ways: Mapping[str, Callable[[], object]], rounds: int, say: Say
) -> Iterator[Entry]:
    """Time full prefill and each of the ways, one after the other, in every round."""
    runs = []
    for number in range(rounds + 1):
        say(f"{', '.join(ways)}: round {number + 1} of {rounds + 1}")
        runs.append((_seconds(plain), [_seconds(way) for way in ways.values()]))
    for column, name in enumerate(ways):
        pairs = [(seconds, others[column]) for seconds, others in runs[1:]]
        yield _entry(name, "of plain prefill's time", pairs)


def _entry(name: str, unit: str, runs: Sequence[tuple[float, float]]) -> Entry:
    """Return what part of the first way's time the second takes."""
    values = tuple(float(f"{ours / other:.6g}") for other, ours in runs)
    return Entry(SPEED, name, unit, values)


def _seconds(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def _child_seconds(command: Sequence[str]) -> float:
    """Return the processor time of a command, run several times."""
    started = resource.getrusage(resource.RUSAGE_CHILDREN)
    for _ in range(_STARTS):
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (ended.ru_utime + ended.ru_stime) - (started.ru_utime + started.ru_stime)
