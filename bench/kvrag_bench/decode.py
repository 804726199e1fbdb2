"""`kvrag bench decode`: tokens a second while an answer is written, against Transformers' generate.

Both continue the same prompt greedily, in turn, in one run. Prefill does not count.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

import torch
from transformers import DynamicCache

from kvrag.engine.engine import KVEngine
from kvrag.errors import ParameterError
from kvrag.fusion.decoding import make_decoder
from kvrag.models.caches import CACHE_ARGUMENT
from kvrag.models.kv_model import KVModel
from kvrag_bench.setting import require_room, temporary_index
from kvrag_bench.shapes import random_model, random_text

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
    """

    model: str | None = None
    shape: str = "qwen2.5-0.5b"
    num_chunks: int = 10
    num_tokens: int = 64
    repeats: int = 3

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
    model = KVModel.load(options.model) if options.model else random_model(options.shape)
    needed = options.num_chunks * (_CHUNK_TOKENS + 2) + _QUESTION_TOKENS + options.num_tokens + 2
    require_room(model, needed, "fewer chunks")
    texts = [random_text(model, _CHUNK_TOKENS, seed=i) for i in range(options.num_chunks)]
    prompt = "\n\n".join([*texts, random_text(model, _QUESTION_TOKENS, seed=options.num_chunks)])
    with temporary_index(model, texts, _CHUNK_TOKENS) as index:
        engine = KVEngine(index)
        ids = torch.tensor([engine.prompt_ids(prompt)])
        plain, ours = [], []
        for _ in range(options.repeats + 1):
            plain.append(_plain(model, ids, options.num_tokens))
            ours.append(_ours(engine, prompt, options.num_tokens))
    seconds = [median(runs[1:]) / options.num_tokens for runs in (plain, ours)]
    return DecodeRow(
        model=model.name,
        num_prompt_tokens=ids.shape[1],
        num_tokens=options.num_tokens,
        num_threads=torch.get_num_threads(),
        plain_seconds=seconds[0],
        kvrag_seconds=seconds[1],
        speedup=seconds[0] / seconds[1],
    )


@torch.no_grad()
def _plain(model: KVModel, ids: torch.Tensor, num_tokens: int) -> float:
    cache = DynamicCache()
    model.hf(input_ids=ids[:, :-1], **{CACHE_ARGUMENT: cache}, logits_to_keep=1)
    started = time.perf_counter()
    # min_new_tokens: an end of the answer does not count.
    model.hf.generate(  # type: ignore[operator]
        input_ids=ids,
        **{CACHE_ARGUMENT: cache},
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
    )
    return time.perf_counter() - started


def _ours(engine: KVEngine, prompt: str, num_tokens: int) -> float:
    fused = engine.fuse(prompt, policy="none", max_tokens=num_tokens)
    started = time.perf_counter()
    decoder = make_decoder(engine.index.model, fused, None)
    logits = fused.logits
    for _ in range(num_tokens):
        logits = decoder.step(int(logits.argmax()))
    seconds = time.perf_counter() - started
    engine.give_back(fused)
    return seconds
