"""Answers side by side in one pass score what each scores alone."""

import pytest
import torch

from kvrag.fusion.repair import make_repair
from kvrag.models.kv_model import KVModel
from kvrag_bench.judge.answers import MAX_CANDIDATE_TOKENS, Answerer
from kvrag_bench.judge.continuing import FullContinuation
from kvrag_testing.bench_top import TEXTS, Bench
from tests.support.models import FAMILIES, OTHER_POSITIONS, make_model, make_tokenizer
from tests.support.properties import every

# Some have a beginning in common, and one is there twice.
CANDIDATES = [[5, 6, 7, 8], [9], [3, 4, 5, 6, 8], [5, 6, 9, 8], [5, 6], [9]]


@pytest.mark.parametrize("family", every(2, [*FAMILIES, *OTHER_POSITIONS]))
def test_candidates_score_as_each_alone(family: str) -> None:
    model = KVModel(make_model(family), make_tokenizer())
    token_ids = model.tokenizer(" ".join(TEXTS))["input_ids"]
    reference = Answerer(model, 5).reference(token_ids, CANDIDATES)
    for candidate, score in zip(CANDIDATES, reference.scores, strict=True):
        with torch.no_grad():
            logits = model.hf(torch.tensor([[*token_ids, *candidate]])).logits[0]
        log_probs = logits[len(token_ids) - 1 : -1].float().log_softmax(-1)
        alone = log_probs[torch.arange(len(candidate)), candidate].mean()
        assert score == pytest.approx(float(alone), abs=1e-5)
    same = Answerer(model, 5).compare_plain(token_ids, reference)
    assert max(same.kl) < 1e-6
    assert same.scores == pytest.approx(reference.scores, abs=1e-5)
    assert Answerer(model, 5).compare_plain(token_ids[:20], reference).kl[0] > 1e-4


def test_after_a_fused_prompt_they_score_as_fed_one_by_one() -> None:
    bench = Bench(KVModel(make_model("mistral-sliding"), make_tokenizer()))
    answerer = Answerer(bench.model, 8)
    layout = bench.lay_out(bench.prompt(2, 0, 3, 1))
    reference = answerer.reference(layout.token_ids, CANDIDATES)
    fused = answerer.fuse(layout, bench.open_kv, make_repair("none"), reference=reference).fused
    going_on = FullContinuation(bench.model, fused)
    together = going_on.score(CANDIDATES)
    with torch.no_grad(), going_on.answering():
        for candidate, logits in zip(CANDIDATES, together, strict=True):
            torch.testing.assert_close(logits, going_on.feed(candidate, 0), atol=1e-5, rtol=1e-5)


def test_only_the_beginning_of_a_long_candidate_is_scored() -> None:
    model = KVModel(make_model(), make_tokenizer())
    long = [5] * (MAX_CANDIDATE_TOKENS + 10)
    reference = Answerer(model, 2).reference([3, 4, 5], [long, []])
    assert reference.candidates == (tuple(long[:MAX_CANDIDATE_TOKENS]), ())
    assert reference.scores[1] == 0.0
