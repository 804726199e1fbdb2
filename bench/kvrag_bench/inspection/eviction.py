"""Which tokens of one prompt an eviction policy keeps, head by head, and what is answered then."""

from __future__ import annotations

from dataclasses import dataclass

from kvrag.codec.raw import RawCodec
from kvrag.engine.text_stream import end_ids
from kvrag.errors import PromptTooLongError
from kvrag.eviction import EvictionReport
from kvrag.eviction.base import EvictionPolicy
from kvrag.fusion.decoding import CacheDecoder, Decoder
from kvrag.fusion.evicting import EvictingDecoder, evict_prompt
from kvrag.fusion.fuser import FusedPrompt
from kvrag.fusion.policies.deviation import DeviationPolicy
from kvrag.models.kv_model import KVModel
from kvrag_bench.judge.bank import ChunkBank
from kvrag_bench.judge.questions import JudgedQuestion, render
from kvrag_bench.quality.oracle import fill

_ANSWER_TOKENS = 16


@dataclass(frozen=True)
class EvictionInspection:
    """What was found.

    Attributes
    ----------
    question, policy
        What was asked, and what forgot.
    tokens
        N texts of one prompt token each.
    kept
        The tokens that each layer and key head holds after the prompt, ascending.
    answer, full_answer
        Greedy answers, with eviction and with the full cache.
    report
        The eviction's report after the answer.
    """

    question: str
    policy: str
    tokens: tuple[str, ...]
    kept: tuple[tuple[tuple[int, ...], ...], ...]
    answer: str
    full_answer: str
    report: EvictionReport

    @property
    def shares(self) -> tuple[float, ...]:
        """For each token the share of all heads that hold it."""
        heads = [set(head) for layer in self.kept for head in layer]
        return tuple(
            sum(token in head for head in heads) / len(heads) for token in range(len(self.tokens))
        )


def inspect_eviction(
    model: KVModel,
    question: JudgedQuestion,
    policy: EvictionPolicy,
    use_chat_template: bool = True,
) -> EvictionInspection:
    """Look at what a policy keeps of the prompt of one question.

    The whole prompt is computed, so that the result shows only eviction.

    Parameters
    ----------
    use_chat_template
        As ``kvrag bench quality`` asks.

    Raises
    ------
    PromptTooLongError
        When the prompt does not fit the model with one token to answer in.
    UnsupportedModelError
        As `EvictingCache` does.
    """
    prompt = render(question.question, question.texts, model.tokenizer, use_chat_template)
    num_tokens = len(prompt.token_ids(model.tokenizer))
    if num_tokens >= model.max_positions:
        raise PromptTooLongError(
            f"{question.place}: the prompt has {num_tokens} tokens, but {model.name} holds "
            f"{model.max_positions} with at least one to answer in"
        )
    bank = ChunkBank(model, question.texts, [RawCodec()])
    layout = bank.lay_out(prompt)
    fused = fill(model, layout, bank.opener(RawCodec.name), DeviationPolicy(ratio=1.0))
    cache = evict_prompt(model, fused, policy)
    full_answer = _answer(model, fused, CacheDecoder(model, fused))
    evicting = EvictingDecoder(model, fused, policy)
    answer = _answer(model, fused, evicting)
    layers = range(model.spec.num_layers)
    return EvictionInspection(
        question=question.question,
        policy=str(policy),
        tokens=tuple(str(model.tokenizer.decode([token])) for token in layout.token_ids),
        kept=tuple(tuple(tuple(head.tolist()) for head in cache.kept(layer)) for layer in layers),
        answer=answer,
        full_answer=full_answer,
        report=evicting.report(),
    )


def _answer(model: KVModel, fused: FusedPrompt, decoder: Decoder) -> str:
    ends = end_ids(model.hf.generation_config, model.tokenizer)
    room = min(_ANSWER_TOKENS, model.max_positions - fused.layout.end_position)
    answer = [int(fused.logits.argmax())]
    while answer[-1] not in ends and len(answer) < room:
        answer.append(int(decoder.step(answer[-1]).argmax()))
    return str(model.tokenizer.decode(answer, skip_special_tokens=True)).strip()
