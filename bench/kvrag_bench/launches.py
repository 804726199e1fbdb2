"""`kvrag bench launches`: what a prompt starts on a graphics card, counted without one.

The model has the layers and heads of a shape, and narrow weights: counts do not depend on widths.
"""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from tokenizers import Regex, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from kvrag.codec.names import RAW
from kvrag.engine.engine import KVEngine
from kvrag.fusion.controller import takes_ratio
from kvrag.fusion.report import FusionReport
from kvrag.fusion.slices import Clock
from kvrag.models import known_text
from kvrag.models.kv_model import KVModel
from kvrag.models.tokens import Tokenizer, facts_of
from kvrag_bench import shapes
from kvrag_bench.card import Counts, pretended_card, to_card
from kvrag_bench.setting import room_in, temporary_index

_NARROW = {"intermediate_size": 128, "vocab_size": 5000, "num_key_value_heads": 2}
_HEAD_DIM = 16


@dataclass(frozen=True)
class LaunchesRow:
    """What one prompt starts, or several that are answered together.

    Attributes
    ----------
    num_prompts
        How many there are. If there are several, their first tokens are drawn, too.
    launches, copies, waits
        Kernels, copies from the host, and times that the host waits for the card, by phase:
        ``"load"``, ``"ask"``, ``"select"`` and ``"compute"`` of the prompt's thread, and
        ``"loader"`` of those that read records.
    launches_per_layer
        All kernels, for each prompt and layer.
    num_waits
        Waits of the prompt's own thread.
    host_ms
        Processor time of the prompt's own thread in milliseconds: its own code, what it computes
        in the host's memory, and 6 µs for each kernel, copy and graph that it starts. Python's
        collecting of garbage is left out.
    host_ms_by_phase
        The same by phase; ``"layout"`` is before fusing begins.
    """

    shape: str
    policy: str
    codec: str
    num_layers: int
    num_tokens: int
    num_prompts: int
    launches: Mapping[str, int]
    copies: Mapping[str, int]
    waits: Mapping[str, int]
    launches_per_layer: float
    num_waits: int
    host_ms: float
    host_ms_by_phase: Mapping[str, float]


def narrow_model(shape: str) -> KVModel:
    """Return a model with a shape's layers and heads, in bfloat16 on the CPU.

    Raises
    ------
    ParameterError
        For an unknown shape.
    """
    whole = shapes.SHAPES.get(shape, {})
    groups = whole.get("num_attention_heads", 1) // whole.get("num_key_value_heads", 1)
    num_heads = 2 * groups
    narrow = _NARROW | {"num_attention_heads": num_heads, "hidden_size": num_heads * _HEAD_DIM}
    with patch.dict(shapes.SHAPES, {shape: {**whole, **narrow}} if whole else {}):
        made = shapes.random_model(shape)
    hf: Any = made.hf
    return KVModel(hf.to(torch.bfloat16), _byte_level_tokenizer(), name=f"narrow {shape}")


def _byte_level_tokenizer() -> Any:
    """Return a tokenizer like Llama 3's, as kvrag loads it: tokenising takes as long as there."""
    words = shapes.random_words()
    syllables = sorted({word[place : place + 2] for word in words for place in (0, 2)})
    merges = [
        *((one[0], one[1]) for one in syllables),
        *(("Ġ", one) for one in syllables),
        *((f"Ġ{word[:2]}", word[2:]) for word in words),
    ]
    tokens = ["<bos>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    backend = Backend(models.BPE({one: number for number, one in enumerate(tokens)}, merges))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = pre_tokenizers.Split(Regex(known_text.PATTERNS[1]), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    backend.decoder = decoders.ByteLevel()
    begin = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    backend.post_processor = processors.Sequence([processors.ByteLevel(), begin])
    made = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>"
    )
    facts = facts_of(made)
    assert facts is not None
    return Tokenizer(made.backend_tokenizer, facts, "", lambda: made)


def count_launches(
    shape: str,
    policy: str,
    *,
    ratio: float = 0.15,
    num_chunks: int = 10,
    chunk_tokens: int = 500,
    question_tokens: int = 30,
    repeats: int = 6,
    memory: str = "none",
    codec: str = RAW,
    num_prompts: int = 1,
) -> LaunchesRow:
    """Return what fusing a prompt starts.

    Parameters
    ----------
    shape
        A name in `kvrag_bench.shapes.SHAPES`.
    policy, ratio
        What is recomputed.
    num_chunks, chunk_tokens, question_tokens
        The prompt.
    codec
        What the chunks are stored with.
    repeats
        Runs. The counts are the last one's, and the least time of the host counts.
    memory
        Where earlier runs leave the chunks' KV: one of `kvrag_bench.setting.MEMORIES`.
    num_prompts
        How many prompts wait at the same time, each with another question.

    Raises
    ------
    ParameterError
        For an unknown shape, policy or memory.
    """
    kept = room_in(memory)
    torch.set_num_threads(1)
    model = narrow_model(shape)
    texts = [shapes.random_text(model, chunk_tokens, seed=i) for i in range(num_chunks)]
    prompts = [
        "\n\n".join([*texts, shapes.random_text(model, question_tokens, seed=num_chunks + number)])
        for number in range(num_prompts)
    ]
    options: dict[str, Any] = {"policy": policy}
    if takes_ratio(policy):
        options["ratio"] = ratio
    with temporary_index(model, texts, chunk_tokens, codec=codec) as index:
        KVEngine(index, session_bytes=0).fuse(prompts[0], policy="none")  # makes first places
        with pretended_card() as counts, _by_stage(counts) as host:
            to_card(model.hf, counts)
            engine = KVEngine(index, session_bytes=0, **kept)
            runs = [_run(engine, prompts, options, counts, host) for _ in range(repeats)]
    report, by_phase = min(runs, key=lambda one: sum(one[1].values()))
    num_layers = model.spec.num_layers
    return LaunchesRow(
        shape=shape,
        policy=policy,
        codec=codec,
        num_layers=num_layers,
        num_tokens=report.num_tokens,
        num_prompts=num_prompts,
        launches=dict(counts.launches),
        copies=dict(counts.copies),
        waits=dict(counts.waits),
        launches_per_layer=counts.launches.total() / num_layers / num_prompts,
        num_waits=counts.waits.total() - counts.waits["loader"],
        host_ms=sum(by_phase.values()) * 1e3,
        host_ms_by_phase={phase: seconds * 1e3 for phase, seconds in by_phase.items()},
    )


def _run(
    engine: KVEngine,
    prompts: Sequence[str],
    options: Mapping[str, Any],
    counts: Counts,
    host: _HostTime,
) -> tuple[FusionReport, dict[str, float]]:
    counts.clear()
    gc.collect()
    gc.disable()  # most of what it would find is the pretending's
    try:
        host.begin()
        if len(prompts) == 1:
            report = engine.fuse(prompts[0], **options).report
        else:
            report = engine.generate_batch(prompts, max_tokens=1, **options)[0].report
        host.note("end")
        with counts.computing():
            counts.settle("end")
    finally:
        gc.enable()
    return report, dict(host.seconds)


class _HostTime:
    """The time of the prompt's thread by phase, as it would be beside a card."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self.begin()

    def begin(self) -> None:
        """Begin with a prompt."""
        self.seconds: dict[str, float] = defaultdict(float)
        self._last = self._now()

    def note(self, phase: str) -> None:
        """Say which phase the time since the last call belongs to."""
        self.seconds[phase] += self._now() - self._last
        self._last = self._now()  # what noting takes is nobody's

    def _now(self) -> float:
        counts = self._counts
        return time.thread_time() - counts.seconds + counts.host_seconds


@contextmanager
def _by_stage(counts: Counts) -> Iterator[_HostTime]:
    """Count what the prompt's thread starts under the stage that its clock then notes."""
    host = _HostTime(counts)
    made, lap = Clock.__init__, Clock.lap

    def noting(clock: Clock, stage: str) -> None:
        host.note(stage)
        lap(clock, stage)
        with counts.computing():
            counts.settle(stage)

    def beginning(clock: Clock) -> None:
        host.note("layout")
        made(clock)

    with patch.object(Clock, "lap", noting), patch.object(Clock, "__init__", beginning):
        yield host
