"""One prompt's figures: where reused KV is off, who repairs it, and who looks at it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from kvrag.codec.raw import RawCodec
from kvrag.errors import ParameterError, PromptTooLongError
from kvrag.fusion.layout import Layout
from kvrag.fusion.policies.base import PromptRows
from kvrag.models.kv_model import KVModel
from kvrag_bench.judge.bank import ChunkBank
from kvrag_bench.judge.questions import JudgedQuestion, render
from kvrag_bench.quality.entrants import QualityOptions, contestants
from kvrag_bench.quality.oracle import TrueDeviation, fill, policy_of


@dataclass(frozen=True)
class Inspection:
    """What was found, L layers and N prompt tokens.

    Attributes
    ----------
    tokens
        N texts of one token each.
    spans
        First token and end of each reused stretch, in prompt order.
    key_deviation, value_deviation
        ``[L][N]``: distance between stored and full-prefill KV, divided by the latter's length.
    picked
        Maps each policy to the positions that it recomputed in the second layer.
    rank_correlation
        L - 1 Spearman correlations between the value deviations of neighbouring layers over
        reused tokens, from layers 0 and 1 on; None where a layer has no deviation (CacheBlend
        §4.3, insight 2).
    key_delta_variance, value_delta_variance
        L ratios: variance of the difference between neighbouring tokens over the variance of the
        values themselves, within channels of the chunks' own KV (CacheGen §5.1, insight 1).
    attention
        ``[L][spans + 1]``: attention of the tokens after the last chunk, mean over heads, to
        each stretch and, last, to everything else.
    """

    question: str
    tokens: tuple[str, ...]
    spans: tuple[tuple[int, int], ...]
    key_deviation: tuple[tuple[float, ...], ...]
    value_deviation: tuple[tuple[float, ...], ...]
    picked: dict[str, tuple[int, ...]]
    rank_correlation: tuple[float | None, ...]
    key_delta_variance: tuple[float, ...]
    value_delta_variance: tuple[float, ...]
    attention: tuple[tuple[float, ...], ...]


def inspect_question(
    model: KVModel,
    question: JudgedQuestion,
    policies: Sequence[str] = ("boundary", "deviation", "two_stage"),
    ratio: float = 0.15,
    use_chat_template: bool = True,
) -> Inspection:
    """Look into the prompt of one question.

    Parameters
    ----------
    model
        The model.
    question
        Chunks and question.
    policies, ratio
        Whose picks to show, and the share of reused tokens each may compute again.
    use_chat_template
        As ``kvrag bench quality`` asks.

    Raises
    ------
    PromptTooLongError, ParameterError
        When the prompt does not fit the model, or nothing of it can be reused.
    """
    prompt = render(question.question, question.texts, model.tokenizer, use_chat_template)
    num_tokens = len(prompt.token_ids(model.tokenizer))
    if num_tokens > model.max_positions:
        raise PromptTooLongError(
            f"{question.place}: the prompt has {num_tokens} tokens, but {model.name} holds "
            f"{model.max_positions}"
        )
    bank = ChunkBank(model, question.texts, [RawCodec()])
    layout = bank.lay_out(prompt)
    inexact = tuple(span for span in layout.spans if not layout.is_exact(span))
    rows = PromptRows(num_tokens, model.spec.num_layers, inexact).reused().numpy()
    if not len(rows):
        raise ParameterError(f"{question.place}: one chunk alone is exact, there is no deviation")
    opener = bank.opener(RawCodec.name)
    deviation = TrueDeviation.of(model, layout, opener)
    picked = {}
    options = QualityOptions(policies=policies, ratios=(ratio,))
    for contestant in contestants(options) if policies else ():
        picks = fill(model, layout, opener, policy_of(contestant, lambda: deviation)).picks
        # After the first layer: in that one, a policy may compute everything in order to choose.
        picked[contestant.policy] = tuple(picks[min(1, len(picks) - 1)].tolist())
    values = deviation.values.numpy()
    chunks = model.prefill(
        bank.prefix_ids,
        [layout.token_ids[span.prompt_start : span.prompt_end] for span in layout.spans],
    )
    return Inspection(
        question=question.question,
        tokens=tuple(str(model.tokenizer.decode([token])) for token in layout.token_ids),
        spans=tuple((span.prompt_start, span.prompt_end) for span in layout.spans),
        key_deviation=_nested(deviation.keys.numpy()),
        value_deviation=_nested(values),
        picked=picked,
        rank_correlation=tuple(_spearman(a[rows], b[rows]) for a, b in pairwise(values)),
        key_delta_variance=_delta_variance([chunk.keys for chunk in chunks]),
        value_delta_variance=_delta_variance([chunk.values for chunk in chunks]),
        attention=_attention(model, layout),
    )


def _spearman(one: np.ndarray, other: np.ndarray) -> float | None:
    # Rounding is no deviation: layer 0 depends on no other token, so its ranks would be noise.
    if min(one.max(), other.max()) < 1e-4 or len(one) < 2:
        return None
    first, second = one.argsort().argsort(), other.argsort().argsort()
    return float(np.corrcoef(first, second)[0, 1])


def _delta_variance(chunks: Sequence[torch.Tensor]) -> tuple[float, ...]:
    """Return one ratio a layer of ``[L, H, T, D]`` tensors."""
    deltas = sum(chunk.float().diff(dim=2).square().sum(dim=(1, 2, 3)) for chunk in chunks)
    own = sum(
        (chunk.float() - chunk.float().mean(dim=2, keepdim=True)).square().sum(dim=(1, 2, 3))
        for chunk in chunks
    )
    assert isinstance(deltas, torch.Tensor)
    return tuple((deltas / own).tolist())


def _attention(model: KVModel, layout: Layout) -> tuple[tuple[float, ...], ...]:
    fed = torch.tensor([layout.token_ids], device=model.device)
    config = model.hf.config
    with model.lock, torch.no_grad():
        original = config._attn_implementation
        config._attn_implementation = "eager"  # the only one that returns its weights
        try:
            weights = model.hf(input_ids=fed, output_attentions=True, use_cache=False).attentions
        finally:
            config._attn_implementation = original
    begin = layout.spans[-1].prompt_end
    layers = []
    for layer in weights:
        mass = layer[0, :, begin:].float().mean(dim=(0, 1))
        on_spans = [float(mass[s.prompt_start : s.prompt_end].sum()) for s in layout.spans]
        layers.append((*on_spans, max(0.0, 1.0 - sum(on_spans))))
    return tuple(layers)


def _nested(values: np.ndarray) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(float(value) for value in row) for row in values)
