"""Ratios of speed, each of two ways that are timed in turn: only the ratio means anything."""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median

from kvrag.codec.fitting import fit_profile
from kvrag.codec.presets import choose_codec
from kvrag.codec.registry import get_codec
from kvrag.engine.engine import KVEngine
from kvrag.fusion.policies import DEFAULT_POLICY
from kvrag.models.kv_model import KVModel
from kvrag.models.loading import load_tokenizer, resolve_model
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
from kvrag_bench.regress.options import CODEC, RegressOptions
from kvrag_bench.regress.results import Entry
from kvrag_bench.setting import chosen_clock, require_one_thread, temporary_index
from kvrag_bench.shapes import random_model, random_text

_QUESTION_TOKENS = 30
_ANSWER_TOKENS = 32
_LOOKUP_TOKENS = 5000
_STARTS = 3  # in each round, since one takes a fraction of a second

Say = Callable[[str], None]


def speed_entries(options: RegressOptions, say: Say) -> Iterator[Entry]:
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
        yield from _prompt_entries(engine, prompt, options.rounds, say)
        say(f"{_ANSWER_TOKENS} tokens of an answer, {options.rounds + 1} times")
        runs = decode_seconds(
            engine, prompt, _ANSWER_TOKENS, options.rounds, chosen_clock(processor_time=True)
        )
        yield _faster("decoding", "times generate's speed", runs)
        yield from _codec_entries(model, options, say)
        yield from _start_entries(index.path, options.rounds, say)
    yield _lookup_entry(options, say)


def _prompt_entries(engine: KVEngine, prompt: str, rounds: int, say: Say) -> Iterator[Entry]:
    runs = []
    for number in range(rounds + 1):
        say(f"time to first token, round {number + 1} of {rounds + 1}")
        runs.append(
            [
                _seconds(lambda: engine.plain_ttft_seconds(prompt)),
                _seconds(lambda: engine.generate(prompt, reuse=False, max_tokens=1)),
                _seconds(lambda: engine.generate(prompt, policy="none", max_tokens=1)),
                _seconds(lambda: engine.generate(prompt, policy=DEFAULT_POLICY, max_tokens=1)),
            ]
        )
    unit = "times plain prefill's speed"
    names = ("prefill", "fused, none", f"fused, {DEFAULT_POLICY}")
    for column, name in enumerate(names, 1):
        yield _faster(name, unit, [(run[0], run[column]) for run in runs[1:]])


def _codec_entries(model: KVModel, options: RegressOptions, say: Say) -> Iterator[Entry]:
    wanted = CodecBenchOptions(
        shape=options.shape,
        context_chunks=max(1, options.num_chunks // 2),
        context_tokens=options.chunk_tokens,
    )
    context = prepare_context(model, wanted, say)
    fit = [
        kv for seed in range(4) for kv in random_chunk(model, options.chunk_tokens, 10**4 + seed)
    ]
    choice = choose_codec(CODEC)
    assert choice.config is not None
    codec = get_codec(choice.label, fit_profile(choice.config, model.spec, NO_MODEL, fit, say))
    num_tokens = sum(kv.num_tokens for kv in context.chunks)
    records = [codec.encode(KEY, kv) for kv in context.chunks]
    runs = []
    for number in range(options.rounds + 1):
        say(f"codec, round {number + 1} of {options.rounds + 1}")
        runs.append(
            [
                _seconds(lambda: plain_prefill(model, num_tokens)),
                _seconds(lambda: [codec.encode(KEY, kv) for kv in context.chunks]),
                _seconds(lambda: decode_context(context, codec, records)),
            ]
        )
    unit = "times plain prefill's speed"
    yield _faster(f"encoding, {CODEC}", unit, [(run[0], run[1]) for run in runs[1:]])
    yield _faster(f"decoding, {CODEC}", unit, [(run[0], run[2]) for run in runs[1:]])


def _start_entries(index: Path, rounds: int, say: Say) -> Iterator[Entry]:
    say("start-up")
    bare = [sys.executable, "-c", "pass"]
    kvrag = [sys.executable, "-m", "kvrag"]
    commands = {
        "start-up, kvrag --help": [*kvrag, "--help"],
        "start-up, kvrag ls": [*kvrag, "ls", "--index", str(index)],
    }
    for name, command in commands.items():
        runs = [(_child_seconds(command), _child_seconds(bare)) for _ in range(rounds + 1)][1:]
        yield _slower(name, "times bare Python's", runs)


def _lookup_entry(options: RegressOptions, say: Say) -> Entry:
    tokenizer = load_tokenizer(resolve_model("kvrag-tiny"))
    text = "The keeper of the harbour writes down every boat. " * (_LOOKUP_TOKENS // 10)
    runs = []
    for number in range(options.rounds + 1):
        say(f"look-up, round {number + 1} of {options.rounds + 1}")
        row = measure_lookup(options.num_lookup_chunks, 256, _LOOKUP_TOKENS, lambda _: None)
        tokenizing = []
        for _ in range(50):
            started = time.thread_time()
            encode(tokenizer, [text], add_special_tokens=False)
            tokenizing.append(time.thread_time() - started)
        runs.append((row.table_seconds + row.compare_seconds, median(tokenizing)))
    return _slower("look-up of a prompt", "times its tokenizing", runs[1:])


def _faster(name: str, unit: str, runs: Sequence[tuple[float, float]]) -> Entry:
    """Return how many times as long the first way takes as the second."""
    values = tuple(one / other for one, other in runs)
    return Entry("speed", name, unit, is_more_better=True, is_timed=True, values=values)


def _slower(name: str, unit: str, runs: Sequence[tuple[float, float]]) -> Entry:
    values = tuple(one / other for one, other in runs)
    return Entry("speed", name, unit, is_more_better=False, is_timed=True, values=values)


def _seconds(work: Callable[[], object]) -> float:
    clock = chosen_clock(processor_time=True)
    started = clock()
    work()
    return clock() - started


def _child_seconds(command: Sequence[str]) -> float:
    """Return the processor time of a command, run several times."""

    def used() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    started = used()
    for _ in range(_STARTS):
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return used() - started
