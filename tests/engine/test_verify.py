"""Answers from reused KV are held against full prefill: one, or a share of all."""

import time
from dataclasses import replace
from typing import Any

import httpx
import pytest
import torch

from kvrag.engine.engine import KVEngine
from kvrag.engine.idle import Idle
from kvrag.engine.request import Request
from kvrag.engine.verify import Audits, Verdict, to_verify, verify
from kvrag.errors import ParameterError
from kvrag.fusion.slices import StoppedError
from kvrag.ingest.index import Index
from kvrag.server.app import ServerOptions
from tests.engine.test_engine import PROMPT
from tests.support.api_server import serving

ASKED = to_verify(Request(PROMPT, max_tokens=12))


@pytest.fixture(scope="module")
def engine(index: Index) -> KVEngine:
    return KVEngine(index, max_tokens=12)


def forward(engine: KVEngine, token_ids: list[int]) -> torch.Tensor:
    """Return the model's own log-probabilities after each token."""
    with torch.no_grad():
        logits: torch.Tensor = engine.index.model.hf(torch.tensor([token_ids])).logits[0]
    return torch.log_softmax(logits, -1)


def test_full_recompute_says_the_same(engine: KVEngine) -> None:
    request = replace(ASKED, policy="boundary", ratio=1.0)
    found = verify(engine, request, engine.generate(request))
    assert (found.policy, found.num_tokens, found.num_agreed) == ("boundary", 12, 12)
    assert found.is_same
    assert found.instead is None
    assert 0 <= found.kl < 1e-6
    assert found.one_line().startswith("full prefill says the same: all 12 tokens, KL ")


def test_what_differs_is_what_transformers_says(engine: KVEngine) -> None:
    request = replace(ASKED, policy="none")
    answer = engine.generate(request)
    found = verify(engine, request, answer)
    prompt_ids = list(engine.prompt_ids(PROMPT))
    token_ids = [one.token_id for one in answer.logprobs]
    full = forward(engine, prompt_ids + token_ids)[len(prompt_ids) - 1 : -1]
    # The answer was greedy: its tokens are the ones that reused KV finds likeliest.
    agreed = (full.argmax(-1) == torch.tensor(token_ids)).tolist()
    assert found.num_tokens == len(token_ids) == 12
    assert found.num_agreed == sum(agreed) < 12
    assert found.num_same == agreed.index(False)
    # KL of the first token alone: that of the two prompts' first logits.
    reused = engine.fuse(request)
    first = torch.log_softmax(reused.logits.float(), -1)
    engine.give_back(reused)
    shortest = replace(request, max_tokens=1)
    one = verify(engine, shortest, engine.generate(shortest))
    assert one.kl == pytest.approx(float((full[0].exp() * (full[0] - first)).sum()), rel=1e-3)
    assert found.instead == engine.generate(PROMPT, reuse=False, max_tokens=12).text
    assert f"differs from token {found.num_same + 1}" in found.one_line()


def test_only_greedy_answers_have_another_text(engine: KVEngine) -> None:
    request = replace(ASKED, policy="none", temperature=1.5, seed=3)
    found = verify(engine, request, engine.generate(request))
    assert not found.is_same
    assert found.instead is None
    assert found.kl > 0


def test_the_other_text_ends_at_a_stop_string(engine: KVEngine) -> None:
    request = replace(ASKED, policy="none")
    whole = verify(engine, request, engine.generate(request)).instead
    assert whole
    stop = whole[len(whole) // 2 :]
    stopped = replace(request, stop=(stop,))
    answer = engine.generate(request)
    assert stop not in answer.text
    assert verify(engine, stopped, answer).instead == whole[: whole.index(stop)]


def test_what_cannot_be_verified(engine: KVEngine) -> None:
    without_tokens = Request(PROMPT, max_tokens=12)
    with pytest.raises(ParameterError, match="cannot be verified without its tokens"):
        verify(engine, without_tokens, engine.generate(without_tokens))
    answer = engine.generate(ASKED)
    evicted = replace(ASKED, eviction="streaming")
    with pytest.raises(ParameterError, match="leave eviction out"):
        verify(engine, evicted, answer)


@pytest.mark.parametrize("most", [0, 3, 12])
def test_it_stops_when_somebody_asks(engine: KVEngine, most: int) -> None:
    asked: list[int] = []

    def is_wanted() -> bool:
        asked.append(1)
        return len(asked) <= most

    answer = engine.generate(ASKED)
    with pytest.raises(StoppedError):
        verify(engine, ASKED, answer, is_wanted)
    assert len(asked) == most + 1
    assert verify(engine, ASKED, answer).num_tokens == 12


def audits(engine: KVEngine, share: float = 1.0) -> tuple[Audits, list[Verdict | None]]:
    found: list[Verdict | None] = []
    return Audits(engine, share, found.append), found


def test_a_share_is_chosen(engine: KVEngine) -> None:
    request = Request(PROMPT, max_tokens=12)
    assert audits(engine, 0.0)[0].chosen(request) == (request, False)
    assert audits(engine)[0].chosen(request) == (to_verify(request), True)
    assert audits(engine)[0].chosen(replace(request, reuse=False))[1] is False
    assert audits(engine)[0].chosen(replace(request, eviction="streaming"))[1] is False
    some = audits(engine, 0.2)[0]
    assert 120 < sum(some.chosen(request)[1] for _ in range(1000)) < 280


def test_audits_wait_for_idle_time(engine: KVEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    some, found = audits(engine)
    answer = engine.generate(ASKED)
    for _ in range(20):
        some.add(ASKED, answer)
    assert found == [None] * 4  # as many wait
    some.work(Idle())
    assert len(found) == 20
    assert all(one is not None and one.num_tokens == 12 for one in found[4:])
    some.add(ASKED, engine.generate(replace(ASKED, reuse=False)))  # nothing to verify
    some.work(Idle())
    assert len(found) == 20


def test_the_error_of_one_answer_is_its_own(
    engine: KVEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    some, found = audits(engine)
    answer = engine.generate(ASKED)
    some.add(replace(ASKED, logprobs=None), replace(answer, logprobs=()))
    some.add(ASKED, answer)
    some.work(Idle())
    assert found[0] is None
    assert found[1] is not None
    assert "an answer is not verified: this answer cannot be verified" in caplog.text


def test_a_server_audits_its_answers(index: Index) -> None:
    engine = KVEngine(index, max_tokens=12)
    body: Any = {"model": "model", "prompt": PROMPT, "max_tokens": 12}
    body["kvrag"] = {"policy": "none", "report": True}
    with serving(index, ServerOptions(audit=1.0), engine) as served:
        found = httpx.post(f"{served.url}/completions", json=body).json()
        assert found["choices"][0]["logprobs"] is None
        while 'kvrag_server_audited_total{outcome="other",policy="none"} 1.0' not in (
            told := httpx.get(f"{served.server.url}/metrics").text
        ):
            time.sleep(0.05)
    lines = dict(line.rsplit(" ", 1) for line in told.splitlines() if not line.startswith("#"))
    tokens = "kvrag_server_audited_tokens_total"
    agreed, other = (
        float(lines[f'{tokens}{{agrees="{one}",policy="none"}}']) for one in ("yes", "no")
    )
    assert agreed + other == 12
    assert other > 0
    assert float(lines['kvrag_server_audited_kl_sum{policy="none"}']) > 0


def test_the_other_text_ends_where_the_window_does(
    engine: KVEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = engine.index.model
    monkeypatch.setattr(model, "max_positions", len(engine.prompt_ids(PROMPT)) + 11)
    request = replace(ASKED, policy="none", max_tokens=200)
    answer = engine.generate(request)
    assert answer.usage.completion_tokens == 11
    found = verify(engine, request, answer).instead
    assert found == engine.generate(PROMPT, reuse=False, max_tokens=200).text != ""


def test_the_other_text_may_end_where_they_differ(
    engine: KVEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = replace(ASKED, prompt=f"{PROMPT} And the clock", policy="none")
    num_same = verify(engine, request, engine.generate(request)).num_same
    assert num_same > 0
    full = replace(request, reuse=False)
    ends = [2, engine.generate(full).logprobs[num_same].token_id]
    monkeypatch.setattr(engine.index.model.hf.generation_config, "eos_token_id", ends)
    expected = engine.generate(full)
    assert (expected.finish_reason, len(expected.logprobs)) == ("stop", num_same)
    assert verify(engine, request, engine.generate(request)).instead == expected.text != ""
