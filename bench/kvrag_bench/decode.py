"""`kvrag bench decode`: tokens a second while an answer is written, against Transformers' generate.

Both continue the same prompt greedily, in turn, in one run. Prefill does not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from transformers import DynamicCache

from kvrag.engine.engine import KVEngine
from kvrag.errors import ParameterError
from kvrag.fusion.decoding import make_decoder
from kvrag.models.kv_model import KVModel
from kvrag.models.writers import CACHE_ARGUMENT
from kvrag_bench.setting import require_room, temporary_index
from kvrag_bench.shapes import chosen_model, random_text

_CHUNK_TOKENS = 200
_QUESTION_TOKENS = 30


@dataclass(frozen=True)
class DecodeOptions:
    """What to measure.

    Attributes
    ----------
    model
        A model folder or name; None takes random weights of `shape`.
    shape
        A name in `kvrag_bench.shapes.SHAPES`.
    num_chunks
        Chunks of 200 tokens in the prompt.
    num_tokens
        Tokens of the answer.
    repeats
        Runs of each way, of which the median is reported; one more runs first and does not count.
    device
        Where the model runs, such as ``"cuda"``; None means the CPU.
    """

    model: str | None = None
    shape: str = "qwen2.5-0.5b"
    num_chunks: int = 10
    num_tokens: int = 64
    repeats: int = 3
    device: str | None = None

    def __post_init__(self) -> None:
        if min(self.num_chunks, self.num_tokens, self.repeats) < 1:
            raise ParameterError("bench decode: chunks, tokens and repeats must be 1 or more")


@dataclass(frozen=True)
class DecodeRow:
    """Seconds a token.

    Attributes
    ----------
    plain_seconds, kvrag_seconds
        Medians, of Transformers' generate and of kvrag.
    speedup
        Their ratio.
    """

    model: str
    num_prompt_tokens: int
    num_tokens: int
    num_threads: int
    plain_seconds: float
    kvrag_seconds: float
    speedup: float


def run_decode_bench(options: DecodeOptions) -> DecodeRow:
    """Measure both ways.

    Raises
    ------
    ParameterError, ModelLoadError, UnsupportedModelError
        Before anything is timed.
    """
    model = chosen_model(options.model, options.shape, options.device)
    needed = options.num_chunks * (_CHUNK_TOKENS + 2) + _QUESTION_TOKENS + options.num_tokens + 2
    require_room(model, needed, "fewer chunks")
    texts = [random_text(model, _CHUNK_TOKENS, seed=i) for i in range(options.num_chunks)]
    prompt = "\n\n".join([*texts, random_text(model, _QUESTION_TOKENS, seed=options.num_chunks)])
    with temporary_index(model, texts, _CHUNK_TOKENS) as index:
        engine = KVEngine(index)
        num_prompt_tokens = len(engine.prompt_ids(prompt))
        runs = decode_seconds(engine, prompt, options.num_tokens, options.repeats)
    seconds = [median(way) / options.num_tokens for way in zip(*runs, strict=True)]
    return DecodeRow(
        model=model.name,
        num_prompt_tokens=num_prompt_tokens,
        num_tokens=options.num_tokens,
        num_threads=torch.get_num_threads(),
        plain_seconds=seconds[0],
        kvrag_seconds=seconds[1],
        speedup=seconds[0] / seconds[1],
    )


def decode_seconds(
    engine: KVEngine,
    prompt: str,
    num_tokens: int,
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
) -> list[tuple[float, float]]:
    """Return seconds of Transformers' generate and of kvrag, each run beside the other.

    Parameters
    ----------
    engine, prompt
        The prompt, over the engine's index.
    num_tokens
        Tokens of the answer.
    repeats
        Runs of each way; one more runs first and does not count.
    clock
        What counts the seconds.
    """
    ids = torch.tensor([engine.prompt_ids(prompt)], device=engine.index.model.device)
    return [
        (
            _plain(engine.index.model, ids, num_tokens, clock),
            _ours(engine, prompt, num_tokens, clock),
        )
        for _ in range(repeats + 1)
    ][1:]


@torch.no_grad()
def _plain(model: KVModel, ids: torch.Tensor, num_tokens: int, clock: Callable[[], float]) -> float:
    cache = DynamicCache()
    model.hf(input_ids=ids[:, :-1], **{CACHE_ARGUMENT: cache}, logits_to_keep=1)
    started = clock()
    # min_new_tokens: an end of the answer does not count.
    model.hf.generate(  # type: ignore[operator]
        input_ids=ids,
        **{CACHE_ARGUMENT: cache},
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
    )
    return clock() - started


def _ours(engine: KVEngine, prompt: str, num_tokens: int, clock: Callable[[], float]) -> float:
    fused = engine.fuse(prompt, policy="none", max_tokens=num_tokens)
    started = clock()
    decoder = make_decoder(engine.index.model, fused, None)
    logits = fused.logits
    for _ in range(num_tokens):
        logits = decoder.step(int(logits.argmax()))
    seconds = clock() - started
    engine.give_back(fused)
    return seconds
