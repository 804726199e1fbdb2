"""How likely an answer's tokens were: the logarithms of plain Transformers, whoever decodes."""

from typing import Any

import pytest
import torch

from kvrag.engine.answer import AnswerDelta, TokenLogprob
from kvrag.engine.engine import KVEngine
from kvrag.engine.request import Request
from kvrag.models.tokens import token_bytes
from tests.support.rag import PASSAGES, Rag, rag

__all__ = ["rag"]

PROMPTS = [f"{text}\n\nWho keeps the {name}?" for name, text in PASSAGES.items()]


def plain_logprobs(rag: Rag, prompt: str, tokens: tuple[TokenLogprob, ...]) -> torch.Tensor:
    """Return Transformers' ``[len(tokens), vocabulary]`` for the same tokens."""
    ids = rag.tokenizer(prompt)["input_ids"] + [one.token_id for one in tokens]
    with torch.no_grad():
        logits = rag.hf(torch.tensor([ids])).logits[0]
    return logits.log_softmax(-1)[-len(tokens) - 1 : -1]


@pytest.mark.parametrize("options", [{}, {"temperature": 1.5, "seed": 3, "top_k": 40}])
def test_answers_written_together(rag: Rag, options: dict[str, Any]) -> None:
    engine = KVEngine(rag.index, max_tokens=12)
    requests = [Request(one, reuse=False, logprobs=4, **options) for one in PROMPTS]
    for prompt, answer in zip(PROMPTS, engine.generate_batch(requests), strict=True):
        assert len(answer.logprobs) >= 8
        expected = plain_logprobs(rag, prompt, answer.logprobs)
        for row, one in zip(expected, answer.logprobs, strict=True):
            assert one.logprob == pytest.approx(float(row[one.token_id]), abs=1e-4)
            values = row.topk(4).values.tolist()
            assert [value for _, value in one.top] == pytest.approx(values, abs=1e-4)
            # Two tokens may be as likely as each other, but for rounding.
            assert [float(row[token_id]) for token_id, _ in one.top] == pytest.approx(
                values, abs=1e-4
            )
            if not options:
                assert one.top[0] == (one.token_id, one.logprob)


def test_tokens_spell_the_answer_and_its_pieces(rag: Rag) -> None:
    engine = KVEngine(rag.index, max_tokens=40, session_bytes=0)
    # Random weights at this temperature write parts of characters, too.
    options: Any = {"temperature": 3.0, "seed": 5, "logprobs": 0}
    answer = engine.generate(PROMPTS[0], **options)
    spelt = b"".join(token_bytes(rag.tokenizer, one.token_id) for one in answer.logprobs)
    assert spelt.decode(errors="replace") == answer.text
    assert all(one.top == () for one in answer.logprobs)
    starts = [one.start for one in answer.logprobs]
    assert starts == sorted(starts)
    assert starts[0] == 0
    deltas: list[AnswerDelta] = list(engine.stream(PROMPTS[0], **options))
    assert tuple(token for one in deltas for token in one.logprobs) == answer.logprobs
    shown = 0
    for delta in deltas:
        assert all(shown <= one.start < shown + len(delta.text) for one in delta.logprobs)
        shown += len(delta.text)


def test_the_tokens_of_a_stop_string_are_left_out(rag: Rag) -> None:
    engine = KVEngine(rag.index, max_tokens=30, session_bytes=0)
    whole = engine.generate(PROMPTS[0], logprobs=1)
    at = whole.logprobs[6].start
    stop = whole.text[at:][:6]
    cut = whole.text.index(stop)
    answer = engine.generate(PROMPTS[0], logprobs=1, stop=[stop])
    assert answer.text == whole.text[:cut]
    assert answer.logprobs == tuple(one for one in whole.logprobs if one.start < cut)
    assert answer.usage.completion_tokens > len(answer.logprobs)
