"""The same prompt answered without kvrag: Transformers prefills every token, then decodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvrag.models.kv_model import KVModel


@dataclass(frozen=True)
class PlainAnswer:
    """Text and waiting times of plain prefill; greedy."""

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
    """Prefill `token_ids` with the model's own forward and decode greedily.

    Parameters
    ----------
    model
        The model that also answers through kvrag.
    token_ids
        Exactly the ids that the fused prompt has.
    max_tokens
        Longest answer.
    stop
        Strings that end the answer.
    on_text
        Given each piece of text as it comes.
    """
    import torch

    from kvrag.engine.text_stream import TextStream

    stop_ids = _stop_ids(model)
    stream = TextStream(model.tokenizer, stop)
    num_new = 0
    started = time.perf_counter()
    ttft_seconds = 0.0
    with torch.inference_mode():
        step = torch.tensor([list(token_ids)], device=model.device)
        cache = None
        while num_new < max_tokens and not stream.stopped:
            output = model.hf(
                input_ids=step, past_key_values=cache, use_cache=True, logits_to_keep=1
            )
            cache = output.past_key_values
            token_id = int(output.logits[0, -1].argmax())
            ttft_seconds = ttft_seconds or time.perf_counter() - started
            if token_id in stop_ids:
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


def _stop_ids(model: KVModel) -> set[int]:
    configured = getattr(model.hf.generation_config, "eos_token_id", None)
    ids = configured if isinstance(configured, list) else [configured]
    return {int(i) for i in [*ids, model.tokenizer.eos_token_id] if i is not None}
