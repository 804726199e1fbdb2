"""`Answer.parts`: what happened to each part of an answered prompt."""

from collections import Counter
from typing import Any

import pytest

from kvrag.engine.engine import KVEngine
from kvrag.errors import ParameterError
from kvrag.models.chat import render_messages
from tests.support.rag import PASSAGES, Rag, rag

__all__ = ["rag"]

MESSAGES = [{"role": "user", "content": "\n\n".join([*PASSAGES.values(), "Who keeps it?"])}]


@pytest.mark.parametrize("policy", ["none", "query:ratio=0.3", "gradual"])
def test_parts_are_the_prompt_and_agree_with_the_report(rag: Rag, policy: str) -> None:
    answer = KVEngine(rag.index, max_tokens=2).generate(MESSAGES, policy=policy, explain=True)
    report, parts = answer.report, answer.parts
    text = render_messages(rag.index.tokenizer, MESSAGES, rag.index.control, ()).text
    assert "".join(part.text for part in parts) == text
    assert [part.start for part in parts] == [0, *(part.end for part in parts[:-1])]
    assert parts[-1].end == report.num_tokens
    numbers: Counter[str] = Counter()
    for part in parts:
        assert len(part.layers) == part.end - part.start
        numbers[part.state] += part.end - part.start
    num_layers = len(report.rows_by_layer)
    assert numbers["fresh"] == report.num_fresh
    assert numbers["exact"] == report.num_exact
    assert numbers["reused"] + numbers["repaired"] == report.num_reused + report.num_recomputed
    assert all(set(p.layers) == {num_layers} for p in parts if p.state == "fresh")
    computed = sum(sum(p.layers) for p in parts if p.state in ("reused", "repaired"))
    assert (computed > 0) == (policy != "none")
    assert {p.why.partition(",")[0] for p in parts if p.state == "reused"} <= set(PASSAGES)


def test_a_prompt_asked_again_was_kept(rag: Rag) -> None:
    """All of it; chunks keep their names."""
    engine = KVEngine(rag.index, max_tokens=2)
    engine.generate(MESSAGES)
    again = engine.generate(MESSAGES, explain=True)
    kept = [part for part in again.parts if part.state == "kept"]
    assert sum(part.end - part.start for part in kept) == again.report.num_kept
    assert again.report.num_kept == again.report.num_tokens
    assert set(PASSAGES) <= {part.why.partition(",")[0] for part in kept}
    assert all(set(part.layers) == {0} for part in kept)


def test_a_chunk_whose_record_is_gone_is_fresh(rag: Rag, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = KVEngine(rag.index, max_tokens=2)
    whole = engine.generate(MESSAGES, policy="none", explain=True)
    lost = next(one for one in reversed(whole.sources))
    open_kv = rag.index.open_kv

    def opened(chunk_id: str, *context: Any, **options: Any) -> object:
        return None if chunk_id == lost.chunk_id else open_kv(chunk_id, *context, **options)

    monkeypatch.setattr(rag.index, "open_kv", opened)
    engine = KVEngine(rag.index, max_tokens=2)
    answer = engine.generate(MESSAGES, policy="none", explain=True)
    assert sum(answer.report.misses.values()) == 1
    fresh = [part for part in answer.parts if part.state == "fresh"]
    assert sum(part.end - part.start for part in fresh) == answer.report.num_fresh
    assert any("not loaded" in part.why for part in fresh)
    assert not any(part.why.startswith(f"{lost.source},") for part in answer.parts)


def test_nobody_asked(rag: Rag) -> None:
    engine = KVEngine(rag.index, max_tokens=2)
    assert engine.generate(MESSAGES).parts == ()
    (part,) = engine.generate(MESSAGES, reuse=False, explain=True).parts
    assert (part.state, part.start) == ("fresh", 0)
    with pytest.raises(ParameterError, match="explain"):
        engine.generate(MESSAGES, explain="yes")  # type: ignore[arg-type]
