"""`kvrag bench fronts`: requests as chat front ends write them."""

from __future__ import annotations

import pytest

from kvrag.chunk import Document
from kvrag.engine.prices import Prices
from kvrag.models.kv_model import KVModel
from kvrag_bench.corpora import Case, read_handbook
from kvrag_bench.serving import fronts
from kvrag_bench.serving.fronts import FRONTS, cut, replay_fronts
from kvrag_testing.bench_top import TEXTS
from tests.support.models import make_model, make_tokenizer

PASSAGES = [("dogs.md", "Dogs are welcome."), ("fares.md", "A cup costs two pounds.")]
SAID = [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Yes."}]


@pytest.mark.parametrize("name", list(FRONTS))
def test_a_request_has_the_history_the_passages_and_the_question(name: str) -> None:
    messages = FRONTS[name].write(SAID, "How much?", PASSAGES)
    assert [one["content"] for one in messages if one in SAID] == ["Hello?", "Yes."]
    assert messages[-1]["role"] == "user"
    assert messages[-1]["content"].endswith("How much?")
    holder = messages[-1] if name == "Open WebUI" else messages[0]
    assert all(text in holder["content"] for _, text in PASSAGES)
    # Documents are cut without losing words.
    front, (document, *_) = FRONTS[name], read_handbook()[0]
    passages = list(cut(document.text, front))
    assert all(0 < len(one) <= front.size for one in passages)
    assert " ".join(passages).split() == document.text.split()


def test_passages_are_reused_wherever_they_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    documents = [Document(f"text-{number}.md", text) for number, text in enumerate(TEXTS)]
    cases = [Case(text[:40], ("",), ()) for text in TEXTS[:2]]
    monkeypatch.setattr(fronts, "read_handbook", lambda: (documents, cases))
    monkeypatch.setattr(Prices, "measure", lambda *_: None)  # all that is found is taken
    model = KVModel(make_model(max_position_embeddings=8192), make_tokenizer())
    turns = replay_fronts(model, 2, 1, 4, embedding="hashing")
    assert [(one.front, one.number) for one in turns] == [(f, n) for f in FRONTS for n in (1, 2)]
    for one in turns:
        assert one.num_cached > 50
        assert one.num_outpriced == 0
