"""`kvrag bench peers`: the same prompts for all, and a failure of one is a row."""

import pytest

from kvrag_bench.peers import run
from kvrag_bench.peers.options import PeersOptions
from kvrag_bench.peers.run import run_peers_bench
from kvrag_bench.peers.workload import VISITS, make_prompts

DOCUMENTS = [f"document {number}" for number in range(9)]


def test_documents_come_back_in_another_order_and_no_two_sets_share_one() -> None:
    prompts = list(make_prompts(DOCUMENTS, 3, 2, seed=1))
    assert [prompt.visit for prompt in prompts] == [*VISITS, *VISITS]
    parts = [[*prompt.texts, prompt.question] for prompt in prompts]
    first, order, question = (one[:-1] for one in parts[:3])
    assert sorted(first) == sorted(order)
    assert first[0] != order[0]
    assert order == question
    assert len({one[-1] for one in parts[:3]}) == 3
    assert not set(first) & set(parts[3][:-1])
    assert prompts == list(make_prompts(DOCUMENTS, 3, 2, seed=1))


def test_rows_compare_with_transformers_and_tell_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    def answers(seconds: float, text: str) -> list[dict[str, object]]:
        times = {"ttft_seconds": seconds, "seconds_per_token": 0.1, "text": text}
        return [
            {"visit": visit, **times, "full_text": "abcd", "full_seconds": 9.0} for visit in VISITS
        ]

    results = {
        "transformers": {
            **{"settings": "s", "version": "1", "peak_bytes": 5},
            "answers": answers(4.0, "abcd"),
        },
        "kvrag none": {
            **{"settings": "s", "version": "1", "peak_bytes": 5},
            "answers": answers(1.0, "abx"),
        },
        "kvrag boundary": {"failure": "it broke"},
    }
    monkeypatch.setattr(run, "_in_a_process", lambda name, _: results[name])
    plain, reused, failed = run_peers_bench(PeersOptions(peers=tuple(results)))
    assert plain.agreement == 1.0
    assert reused.speedup == dict.fromkeys(VISITS, 4.0)
    assert reused.agreement == 0.5
    assert reused.tokens_per_second == pytest.approx(10.0)
    assert failed.failure == "it broke"


@pytest.mark.slow
def test_a_tool_that_refuses_its_work_says_why_in_its_row() -> None:
    (row,) = run_peers_bench(
        PeersOptions("kvrag-tiny", ("kvrag none",), num_chunks=100, num_sets=1, max_tokens=1)
    )
    assert "kvrag.errors" not in row.failure
    assert "the prompt has" in row.failure
