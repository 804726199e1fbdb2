"""Answer a prompt without kvrag: Transformers prefills every token, then decodes.

The loop does not use the engine with ``reuse=False``, because the baseline has to be the model's
own forward pass over its own cache, not over kvrag's rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvrag.models.caches import CACHE_ARGUMENT

if TYPE_CHECKING:
    from kvrag.models.kv_model import KVModel


@dataclass(frozen=True)
class PlainAnswer:
    """The text and the times of a greedy answer by full prefill."""

    text: str
    prompt_tokens: int
    completion_tokens: int
    ttft_seconds: float
    total_seconds: float


def answer_plainly(
    model: KVModel,
    token_ids: Sequence[int],
    max_tokens: int,
    stop: Sequence[str] = (),
    on_text: Callable[[str], None] = lambda _text: None,
) -> PlainAnswer:
    """Prefill `token_ids` with the model's own forward pass, and decode greedily.

    Parameters
    ----------
    model
        The model that also answers through kvrag.
    token_ids
        The ids of the fused prompt.
    max_tokens
        Maximum length of the answer.
    stop
        Strings that end the answer.
    on_text
        Called with each piece of text as it is generated.
    """
    import torch

    from kvrag.engine.text_stream import TextStream, end_ids

    ends = end_ids(model.hf.generation_config, model.tokenizer)
    stream = TextStream(model.tokenizer, stop, stop_loops=True)
    num_new = 0
    started = time.perf_counter()
    ttft_seconds = 0.0
    with torch.inference_mode():
        step = torch.tensor([list(token_ids)], device=model.device)
        cache = None
        while num_new < max_tokens and not (stream.stopped or stream.looped):
            with model.lock:
                output = model.hf(
                    input_ids=step, **{CACHE_ARGUMENT: cache}, use_cache=True, logits_to_keep=1
                )
            cache = getattr(output, CACHE_ARGUMENT)
            token_id = int(output.logits[0, -1].argmax())
            ttft_seconds = ttft_seconds or time.perf_counter() - started
            if token_id in ends:
                break
            num_new += 1
            on_text(stream.push(token_id))
            step = torch.tensor([[token_id]], device=model.device)
    on_text(stream.finish())
    return PlainAnswer(
        text=stream.text,
        prompt_tokens=len(token_ids),
        completion_tokens=num_new,
        ttft_seconds=ttft_seconds,
        total_seconds=time.perf_counter() - started,
    )
