"""`/v1/rerank`: documents of the client's, ordered by the embedding or by a cross-encoder."""

import json
from collections.abc import Sequence
from typing import Any

import httpx
import numpy as np
import pytest

from kvrag.ingest.search import Reranker
from kvrag.server.app import ServerOptions
from tests.support.api_server import Served, serving
from tests.support.rag import PASSAGES, Rag

TEXTS = list(PASSAGES.values())
QUERY = "the tall clock of Varn"
ASKED: dict[str, Any] = {"model": "hashing-2", "query": QUERY, "documents": TEXTS}


class Shortest:
    """A cross-encoder that prefers short texts, as no search would."""

    def predict(self, pairs: Sequence[tuple[str, str]], **_: Any) -> Any:
        return np.array([float(-len(text)) for _, text in pairs])


def post(served: Served, **changed: Any) -> httpx.Response:
    body = json.dumps(ASKED | changed)  # httpx itself refuses half of a surrogate pair
    headers = {"Content-Type": "application/json"}
    return httpx.post(f"{served.url}/rerank", content=body, headers=headers, timeout=60)


def test_without_a_reranker_it_is_the_embeddings_cosine(served: Served) -> None:
    body = post(served).json()
    embedding = served.engine.index.embedding
    cosines = embedding.embed(TEXTS) @ embedding.embed_query(QUERY)
    order = np.argsort(-cosines, kind="stable")
    assert [one["index"] for one in body["results"]] == order.tolist()
    assert order[0] == list(PASSAGES).index("clock")
    scores = [one["relevance_score"] for one in body["results"]]
    assert scores == pytest.approx(cosines[order].tolist(), abs=1e-6)
    assert body["model"] == "hashing-2"
    assert body["id"].startswith("rerank-")
    tokenizer = served.engine.index.tokenizer
    num_tokens = sum(
        len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in [QUERY, *TEXTS]
    )
    assert body["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    assert all(one.keys() == {"index", "relevance_score"} for one in body["results"])


def test_a_cross_encoder_ranks_and_orders_what_the_server_finds(rag: Rag) -> None:
    with serving(rag.index, ServerOptions(reranker=Reranker(Shortest()), top_k=1)) as served:
        assert post(served).status_code == 404  # the embedding is no longer what ranks
        body = post(served, model="Shortest").json()
        shortest = min(range(len(TEXTS)), key=lambda number: len(TEXTS[number]))
        score = float(-len(TEXTS[shortest]))
        assert body["results"][0] == {"index": shortest, "relevance_score": score}
        models = httpx.get(f"{served.url}/models").json()["data"]
        assert [one["id"] for one in models] == ["model", "rag:index", "hashing-2", "Shortest"]
        question = "Who keeps the harbour ledger?"
        expected = rag.index.search(question, 1, reranker=Reranker(Shortest()))[0].chunk
        asked = {
            "model": served.rag,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": 1,
        }
        answer = httpx.post(f"{served.url}/chat/completions", json=asked, timeout=60).json()
        (cited,) = answer["choices"][0]["message"]["annotations"]
        assert cited["url_citation"]["chunk_id"] == expected.chunk_id
        assert expected.text == TEXTS[shortest]
        assert rag.index.search(question, 1)[0].chunk.text != TEXTS[shortest]
